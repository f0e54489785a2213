"""`python -m nestling` is the command line."""

from nestling.cli import entry

if __name__ == "__main__":
    entry()
