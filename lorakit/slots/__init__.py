"""Many adapters on one base at once: their factors side by side, and each token's own adapter. For serving alone."""
