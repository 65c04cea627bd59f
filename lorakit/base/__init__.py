"""A base model: find it, load it in full, on meta or by ranges, and quantise it while it is read."""
