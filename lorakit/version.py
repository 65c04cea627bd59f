"""lorakit's version, the one place it is written, and the versions beside it that decide a run's numbers."""

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers."""
    import platform
    from importlib.metadata import version

    names = ("torch", "transformers", "tokenizers", "accelerate")
    return {"lorakit": VERSION, "python": platform.python_version(), **{name: version(name) for name in names}}
