"""Turn a row of several answers or texts into a row for each of them, which row_formats.py reads.

Invariant: both rows of a preference pair have the same prompt, and no answer is part of it that only one of them has.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from lorakit.data.chat_template import common_length
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import ROLES, has_value, parse_json

ANSWERS: Final = ("chosen", "rejected")
PROMPTS: Final = ("messages", "conversations", "prompt")  # keys of a prompt, besides `instruction` with its `input`
TEXTS: Final = ("anchor", "positive", "negative")


def to_pair(row: Any, ignore: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two rows of a preference pair: the prompt with the chosen answer, and with the rejected one.

    The prompt is in the keys of any other format, or also in the answers, as full conversations. Without it, it is what
    both answers begin with: messages or letters.
    Raises BadRow: no pair, or equal answers.
    """
    missing = [key for key in ANSWERS if not isinstance(row, Mapping) or not has_value(row.get(key))]
    if missing == [*ANSWERS]:
        raise BadRow("the objective reads pairs, rows with `chosen` and `rejected`; objective sft reads single answers")
    if missing:
        raise BadRow(f"{missing[0]}: missing or empty; a pair has `chosen` and `rejected`")
    rest = {key: value for key, value in row.items() if key not in (*ANSWERS, *ignore)}
    answers = [[row[key]] if isinstance(row[key], Mapping) else row[key] for key in ANSWERS]
    for key, one in zip(ANSWERS, answers, strict=True):
        if not isinstance(one, str) and not (isinstance(one, list) and all(isinstance(turn, Mapping) for turn in one)):
            raise BadRow(f"{key}: a text or messages expected, got {str(row[key])[:40]}")
    if answers[0] == answers[1]:
        raise BadRow("chosen and rejected are the same answer")
    if "instruction" in rest:
        return {**rest, "output": answers[0]}, {**rest, "output": answers[1]}
    prompt, answers = _split(_prompt_of(rest, answers[0]), answers)
    return {**rest, "prompt": prompt, "completion": answers[0]}, {**rest, "prompt": prompt, "completion": answers[1]}


def to_texts(row: Any, num_negatives: int, ignore: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a row's texts: of its anchor, its positive, and its negatives, a text or a list of texts.

    Negatives may also be under `negative_1`, `negative_2` and so on, as sentence-transformers writes them.
    Raises BadRow: a text is missing, or empty, or there are not as many negatives.
    """
    row = row if isinstance(row, Mapping) else {}
    if missing := [key for key in TEXTS[:2] if not has_value(row.get(key))]:
        raise BadRow(
            f"the objective reads rows with `anchor` and `positive`, and this has no {' and no '.join(missing)}; name"
            " other columns: data.columns: {anchor: COLUMN, positive: COLUMN}"
        )
    numbered = [f"{TEXTS[2]}_{number}" for number in range(1, num_negatives + 1)]
    given = row.get(TEXTS[2])
    negatives = [*given] if isinstance(given, list | tuple) else [given]
    negatives = [one for one in (*negatives, *map(row.get, numbered)) if one is not None]
    if len(negatives) != num_negatives:
        raise BadRow(f"negative: has {len(negatives)} texts, and objective.negatives is {num_negatives}")
    texts = [row[TEXTS[0]], row[TEXTS[1]], *negatives]
    if wrong := [one for one in texts if not isinstance(one, str) or not one.strip()]:
        raise BadRow(f"anchor, positive and negative are texts, got {repr(wrong[0])[:40]}")
    if row[TEXTS[1]] in negatives:
        raise BadRow("negative: is the positive too")
    rest = {key: value for key, value in row.items() if key not in (*TEXTS, *numbered, *ignore)}
    return [{**rest, "text": text} for text in texts]


def _prompt_of(rest: dict[str, Any], chosen: Any) -> Any:
    """Remove the prompt from a row's other keys, and return it: messages where the answers are, else text or messages.

    Raises BadRow: it ends with an answer, and is no copy of the chosen conversation.
    """
    key = next((key for key in PROMPTS if has_value(rest.get(key))), None)
    prompt = "" if key is None else rest.pop(key)
    if key in ("messages", "conversations"):
        prompt = parse_json(key, prompt)
    if isinstance(chosen, list) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(prompt, str | list) and prompt == chosen:
        return prompt[:0]
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if isinstance(last, Mapping) and ROLES.get(str(last.get("role", last.get("from")))) == "assistant":
        raise BadRow(f"{key}: ends with an answer, beside chosen and rejected; data.ignore_keys: [{key}]")
    return prompt


def _split(prompt: Any, answers: list[Any]) -> tuple[Any, list[Any]]:
    """Return the prompt, and the answers without it. Raises BadRow: without a prompt, answers of two types."""
    if isinstance(prompt, list):
        answers = [[{"role": "assistant", "content": one}] if isinstance(one, str) else one for one in answers]
    if not prompt:
        number = _shared_length(*answers)
        return answers[0][:number], [one[number:] for one in answers]
    if isinstance(prompt, list) and all(isinstance(one, list) and one[: len(prompt)] == prompt for one in answers):
        return prompt, [one[len(prompt) :] for one in answers]  # full conversations
    return prompt, answers


def _shared_length(chosen: Any, rejected: Any) -> int:
    """Return how many messages or letters two answers begin with alike; of text up to a space, not inside a word."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise BadRow("chosen and rejected are both text or both lists of messages")
    shared = common_length(chosen, rejected)
    if isinstance(chosen, list):
        return shared
    space = re.search(r"\s\S*$", chosen[:shared])
    return space.start() if space else 0
