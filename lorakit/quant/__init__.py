"""Weights quantised to 4 and 8 bits, in memory and in files. The only importer of bitsandbytes."""
