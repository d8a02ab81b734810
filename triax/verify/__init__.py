"""Where do claims meet reality: is what was written, planned or promised what is there?"""
