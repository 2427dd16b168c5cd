"""The `memfit` command: one file for each of its commands, nothing heavy imported before one is run."""

from memfit.cli.command import main

__all__ = ["main"]
