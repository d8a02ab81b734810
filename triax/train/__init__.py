"""How does a run go from one step to the next?"""
