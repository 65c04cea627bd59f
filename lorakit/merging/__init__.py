"""Merge patches into a base, W = W0 + s B A, from files to files, a few rows of one tensor at a time."""
