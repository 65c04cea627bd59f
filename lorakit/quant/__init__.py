"""Weights in 4 and 8 bits, in memory and on disk. The only importer of bitsandbytes."""
