"""How do tests play several ranks on one machine?"""
