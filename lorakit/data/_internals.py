"""The private name of another library that data/ depends on. tests/data asserts that it still exists."""

from typing import Any


def dataset_fingerprint(dataset: Any) -> str:
    """Return the fingerprint of a hub data set, which changes with its content.

    Read in datasets 5.2: no public attribute has ``Dataset._fingerprint``. Without it, a hub data set that changed
    would be read from the token cache of the old one.
    """
    return str(dataset._fingerprint)
