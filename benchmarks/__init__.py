"""Measurements beside the peers: `python -m benchmarks.NAME`, or `make bench`. Each prints a table and writes JSON."""
