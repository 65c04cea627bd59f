"""Inspect patches, runs, bases and this machine: show, diff, doctor."""
