"""Fused and recomputed operations. They take tensors and modules, and import no adapter settings or engines."""
