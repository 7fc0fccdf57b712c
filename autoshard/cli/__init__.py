"""The command line: `autoshard plan MODEL ...`, `autoshard doctor`."""

from autoshard.cli.app import app, main

__all__ = ["app", "main"]
