"""Divide a conversation into rows, so that each answer is trained as it is asked in use.

A row holds several answers where the text of each, up to its end token, is the beginning of the last one's prompt.
Where the template shows an earlier answer otherwise once others follow, such as without its thinking, it is a row of
its own:

    row 1   <|user|>hi<|end|><|assistant|>[hm</think>yes<|end|>]
    row 2   <|user|>hi<|end|><|assistant|>yes<|end|><|user|>and now<|end|><|assistant|>[so</think>no<|end|>]

Invariant: the tokens before each answer are those of its prompt in use.
"""

from collections.abc import Sequence
from typing import Final

from lorakit.data.chat_template import Answer, common_letters
from lorakit.data.row_files import BadRow

SHOWN_LETTERS: Final = 60
"""of each of two texts that differ"""


def divide(answers: Sequence[Answer], turns: str) -> list[list[Answer]]:
    """Return the answers of each row of a conversation, at least one row, in order. ``turns``: as `data.turns`.

    Raises:
        BadRow: ``turns`` is ``all``, and the answers do not fit into one row.
    """
    if turns == "last":
        return [[answers[-1]]]
    if turns == "each":
        return [[answer] for answer in answers]
    rows = list[list[Answer]]()
    waiting = list(answers)
    while waiting:
        last = waiting.pop()
        joined = [one for one in waiting if one.end_token and last.prompt.startswith(one.prompt + one.text)]
        waiting = [one for one in waiting if one not in joined]
        rows.append([*joined, last])
        if waiting and turns == "all":
            raise _two_forms(waiting[-1], last)
    return rows[::-1]


def _two_forms(answer: Answer, last: Answer) -> BadRow:
    """Return the error for an answer that is asked in one form and shown in another one later."""
    text = answer.prompt + answer.text
    own, shown = (one[common_letters(text, last.prompt) :][:SHOWN_LETTERS] for one in (text, last.prompt))
    why = f"once others follow, the chat template shows {shown!r}" if answer.end_token else "no end token follows it"
    return BadRow(
        f"data.turns: all: message {answer.index + 1} is asked as {own!r}, and {why}; `auto` makes a row of it"
    )
