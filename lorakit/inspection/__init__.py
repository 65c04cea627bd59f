"""Show, compare and examine: patches, bases, runs, this machine."""
