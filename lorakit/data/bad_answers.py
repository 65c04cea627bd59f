"""Refuse rows that say which of their answers are good, because objective sft would learn the bad ones too.

Invariant: no remedy leaves such a key unread. The error has three lines of Python that keep the good answers.
"""

from collections.abc import Mapping
from typing import Any, Final

from lorakit.data.row_files import BadRow

_PREFERENCE: Final = "a preference pair, and objective sft learns one answer; keep the better one"
_KTO: Final = "whether the answer is good, which objective sft does not read; keep the good ones"
WORTH: Final = {
    "chosen": _PREFERENCE, "rejected": _PREFERENCE, "chosen_rejected": _PREFERENCE,
    "label": _KTO, "kto_tag": _KTO,
}  # fmt: skip
"""key of a row -> what it says; `UNIGNORED_KEYS` of recipe/data.py has the same keys, as a test checks"""


def bad_answers(key: str, row: Mapping[Any, Any]) -> BadRow:
    """Return the error for a row of which a key says which answers are good, with Python that keeps the good ones."""
    if key in ("label", "kto_tag"):
        is_good = f'str(row["{key}"]).lower() in ("true", "1")' if isinstance(row[key], str) else f'row["{key}"] > 0'
        keep = f'filter(lambda row: {is_good}).remove_columns("{key}")'
    elif key == "rejected":  # without a better one beside it, which is the row's answer
        keep = 'remove_columns("rejected")'
    else:
        keep = f"map({_better_answer(row)})"
    is_sure = key != "label" or isinstance(row[key], bool)
    other = "" if is_sure else " (if it means something else, name the columns to read in data.columns)"
    return BadRow(
        f"{key}: {WORTH[key]}{other}:\n"
        "      import datasets\n"
        '      rows = datasets.load_dataset("json", data_files="FILE", split="train")  # or "csv", "parquet"\n'
        f'      rows.{keep}.to_json("good.jsonl")'
    )


def _better_answer(row: Mapping[Any, Any]) -> str:
    """Return the arguments of `Dataset.map` that make the better one of a pair the answer of its row."""
    pair = "chosen_rejected" if "chosen_rejected" in row else "chosen"
    better = row.get(pair)
    value = f'row["{pair}"]'
    if pair == "chosen_rejected":
        better = better[0] if isinstance(better, list) and better else None
        value += "[0]"
    left_out = [key for key in ("chosen", "rejected", "chosen_rejected") if key in row]
    if turns := next((key for key in ("messages", "conversations") if key in row), None):
        answer = f'[*row["{turns}"], {"*" if isinstance(better, list) else ""}{value}]'
        return f'lambda row: {{"{turns}": {answer}}}, remove_columns={left_out}'
    if isinstance(better, list) and not isinstance(row.get("prompt"), list):  # it has its prompt in it
        left_out += ["prompt"] if "prompt" in row else []
        return f'lambda row: {{"messages": {value}}}, remove_columns={left_out}'
    target = "output" if "instruction" in row else "completion" if "prompt" in row else "text"
    return f'lambda row: {{"{target}": {value}}}, remove_columns={left_out}'
