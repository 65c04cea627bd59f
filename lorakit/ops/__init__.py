"""Fused operations on tensors. Torch only: no adapter settings, no recipe, no engine."""
