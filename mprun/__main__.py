"""``python -m mprun``."""

from mprun.cli import entry

if __name__ == "__main__":
    entry()
