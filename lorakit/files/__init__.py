"""Atomic files, safetensors read by ranges, names of dtypes, and the weight files of a base."""
