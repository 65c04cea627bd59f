"""Rows of training data, as JSON lines."""

import json
import random
from pathlib import Path
from typing import Any

from lorakit.data.dataset import TokenDataset
from lorakit.data.find_rows import find_sources
from lorakit.data.row_settings import RowSettings
from lorakit.data.token_cache import Progress, no_progress, tokenize_sources


def chat(user: str, assistant: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_uneven_rows(path: Path, number: int) -> Path:
    """Write so many chats, with answers of 2 to 12 words."""
    return write_rows(path, [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(number)])


def write_judged_rows(path: Path, number: int) -> Path:
    """Write so many chats as `write_uneven_rows`, every third of them undesirable."""
    answers = ["so " * (1 + i * 7 % 11) + str(i) for i in range(number)]
    return write_rows(path, [chat(f"say {i}", one) | {"label": i % 3 > 0} for i, one in enumerate(answers)])


def write_text_rows(path: Path, number: int) -> Path:
    """Write so many anchors of 3 words, each with a positive of 2 to 12 words."""
    return write_rows(
        path, [{"anchor": f"who said {i}", "positive": "so " * (1 + i * 7 % 11) + str(i)} for i in range(number)]
    )


def write_weighted_rows(path: Path, number: int) -> list[dict[str, Any]]:
    """Write and return so many rows of 4 to 9 token ids; two of three bring weights of their tokens, one a weight."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for index in range(number):
        length = 4 + index % 6
        rows.append({"input_ids": draw.choices(range(5, 30), k=length), "mask": [0, 0] + [1] * (length - 2)})
        if index % 3:
            rows[-1]["weights"] = [round(draw.uniform(0.1, 3), 2) for _ in range(length)]
    rows[1]["weight"] = 0.5
    write_rows(path, rows)
    return rows


def tokenize_rows(
    names: str | tuple[str, ...], split: str, tokenizer: Any, settings: RowSettings, progress: Progress = no_progress
) -> TokenDataset:
    """Tokenise the rows of files. ``split``: of hub data sets."""
    return tokenize_sources(find_sources(names, split), tokenizer, settings, progress)
