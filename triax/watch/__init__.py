"""What is measured, and where is it written?"""
