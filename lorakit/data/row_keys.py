"""Decide about every key of a row, a turn and a message: it is read, or it is harmless, or the row is refused.

A key that is ignored where it decides the labels gives a silent wrong result: ``"train": false`` beside an
answer, or KTO's ``"label": false`` beside a bad one. So an unknown key is an error that names the key.
``data.ignore_keys`` of the recipe names those that are not to be read.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from lorakit.data.json_row import BadRow

HARMLESS: Final = frozenset({
    "_id", "author", "category", "conversation_id", "created_at", "dataset", "date", "domain", "guid", "hash", "id",
    "idx", "index", "lang", "language", "license", "message_id", "meta", "metadata", "model", "num_tokens", "num_turns",
    "prompt_id", "row_id", "source", "split", "subset", "tags", "task", "timestamp", "token_count", "topic", "uid",
    "updated_at", "url", "uuid",
})  # fmt: skip
"""keys of a row's origin, which decide no label"""
HARMLESS_IN_MESSAGES: Final = HARMLESS | {"name", "tool_call_id"}
SWITCHES: Final = ("weight", "train", "loss")
"""keys of a message that turn its loss on or off: OpenAI's, axolotl's and another's name"""
_PREFERENCE: Final = "a preference pair, and objective sft learns one answer; keep the better one as the row's answer"
_KTO: Final = (
    "whether the answer is good, which objective sft does not read; remove the rows with bad answers, and the key"
)
_MEDIA: Final = "lorakit trains on text alone; leave such rows out"
REMEDIES: Final = {
    "chosen": _PREFERENCE, "rejected": _PREFERENCE, "chosen_rejected": _PREFERENCE,
    "label": _KTO, "kto_tag": _KTO,
    "image": _MEDIA, "images": _MEDIA, "video": _MEDIA, "videos": _MEDIA, "audio": _MEDIA, "audios": _MEDIA,
    "history": "not read; put the earlier turns into `messages`",
    "system": "plain text has no system prompt; use `messages`, or write it into the prompt",
    "tools": "plain text has no tools; use `messages`",
    "function_call": "OpenAI's earlier form; use `tool_calls`",
    "functions": "OpenAI's earlier form; use `tools`",
    "train": "of a full row is not read; write weight: 0 for a row that is not to be trained on",
    "loss": "of a full row is not read; write weight: 0 for a row that is not to be trained on",
}  # fmt: skip
"""key -> what it means and where it is meant to go"""


def has_value(value: Any) -> bool:
    """True unless a value is None, or an empty text, list or mapping, which say nothing."""
    return value is not None and not (isinstance(value, str | list | tuple | Mapping) and not value)


def harmless_keys(
    item: Mapping[str, Any],
    read: Collection[str],
    ignore: Collection[str],
    harmless: Collection[str] = HARMLESS,
    where: str = "",
) -> Iterable[str]:
    """Return the keys with a value that are neither read nor refused. ``where``: the message, for the error.

    Raises:
        BadRow: a key is neither read nor harmless nor one to ignore.
    """
    unread = [key for key, value in item.items() if has_value(value) and key not in read]
    for key in unread:
        if key not in ignore and key not in harmless:
            raise refusal(key, where)
    return unread


def refusal(key: str, where: str = "") -> BadRow:
    """Return the error for a key that is not read. ``where``: the message that has it; empty for the row."""
    name = str(key)[:40]
    of_row_alone = (*SWITCHES, "system", "tools", "history")
    remedy = REMEDIES.get(key) if not (where and key in of_row_alone) else None
    why = f": {remedy}" if remedy else "" if where else ": not a key that is read here"
    return BadRow(f"{where}{name}{why} (data.ignore_keys: [{name}] leaves it unread)")


def is_switched_on(where: str, message: Mapping[str, Any]) -> bool:
    """Return if a message's ``weight``, ``train`` or ``loss`` leaves the loss on it; True without any of them.

    Raises:
        BadRow: another value than 0, 1, false or true, or two of them that disagree.
    """
    values = {key: message[key] for key in SWITCHES if message.get(key) is not None}
    for key, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"{where}{key}: 0 or 1 expected, got {repr(value)[:40]}")
    if len({bool(value) for value in values.values()}) > 1:
        raise BadRow(f"{where}{', '.join(values)} disagree")
    return all(values.values())
