"""``python -m triax``: the same as the command ``triax``."""

from triax.cli import main

if __name__ == "__main__":
    main()
