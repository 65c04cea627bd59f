"""The names of dtypes that recipes, options and Python calls take: torch's, and the short ones of the field."""

from typing import Any, Final

SHORT_NAMES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype_name(name: Any) -> Any:
    """Return torch's name of a dtype for a short one; anything else unchanged, for its own check."""
    return SHORT_NAMES.get(name, name) if isinstance(name, str) else name
