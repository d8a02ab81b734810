"""Is what is measured right, and is it still there after a kill?"""
