"""Adapters of other programs, both ways: exactly the same update, or a refusal that says what stands in the way."""
