"""Processes of one machine and ranks that notice failures. Imports no torch at its top."""
