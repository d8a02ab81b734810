"""How does the trained model write text?"""
