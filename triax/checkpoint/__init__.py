"""How does state lie on disk, without pickle and without a trace of the layout?"""
