"""Make a patch from other patches, or from two full models."""
