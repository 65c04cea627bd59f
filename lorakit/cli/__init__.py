"""The commands, one file per group. Each imports its workflow when it runs, so that --help is instant."""

from lorakit.cli.main import main

__all__ = ["main"]
