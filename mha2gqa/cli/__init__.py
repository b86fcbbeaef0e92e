"""The command line. Importing it imports nothing heavy."""

from .commands import main

__all__ = ["main"]
