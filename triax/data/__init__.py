"""Which tokens does a step read, by number alone?"""
