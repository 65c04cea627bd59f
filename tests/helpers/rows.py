"""Rows of training data, as JSON lines."""

import json
from pathlib import Path
from typing import Any

from lorakit.data import RowSettings, TokenDataset, find_sources
from lorakit.data.token_cache import Progress, no_progress, tokenize_sources


def chat(user: str, assistant: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_uneven_rows(path: Path, number: int) -> Path:
    """Write so many chats, with answers of 2 to 12 words."""
    return write_rows(path, [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(number)])


def tokenize_rows(
    names: str | tuple[str, ...], split: str, tokenizer: Any, settings: RowSettings, progress: Progress = no_progress
) -> TokenDataset:
    """Tokenise the rows of files. ``split``: of hub data sets."""
    return tokenize_sources(find_sources(names, split), tokenizer, settings, progress)
