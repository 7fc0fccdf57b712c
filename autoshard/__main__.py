"""`python -m autoshard`: the command line, for use if the command `autoshard` is not on the path."""

from autoshard.cli import main

if __name__ == "__main__":
    main()
