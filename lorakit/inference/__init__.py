"""Inference in Python: many adapters on one base."""
