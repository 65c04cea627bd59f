"""Fused and recomputed operations. They know tensors and modules, and nothing of adapter settings or engines."""
