"""A base model: found, loaded in full, on meta or by ranges, quantised while it is read."""
