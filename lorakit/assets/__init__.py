"""The built-in base model `tiny`, the scripts that make it, and the small tasks of the quick start."""
