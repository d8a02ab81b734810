"""Do the promises of the design hold?"""
