"""Rows -> chat template -> tokens and label mask -> micro-batches, exactly resumable."""
