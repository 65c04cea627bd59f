"""The axis `sequence`: ranks with other tokens of the same rows, by DeepSpeed's Ulysses."""
