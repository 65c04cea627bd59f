"""Many adapters on one base in Python."""
