"""Patches made from patches, or from two full models."""
