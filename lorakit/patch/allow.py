"""What a caller may accept of a base that is not the one a patch was trained on."""

from typing import Final, Literal, get_args

from lorakit.errors import PatchError, did_you_mean

Allow = Literal["base", "template"]
"""``base``: other weights, config or tokenizer. ``template``: prompts that are written in another way."""
ALLOW: Final[tuple[Allow, ...]] = get_args(Allow)


class RefusedBaseError(PatchError):
    """A patch on a base that the caller can accept with ``allow``."""

    def __init__(self, problem: str, allow: Allow) -> None:
        super().__init__(f"{problem}; to use it all the same, pass --allow {allow} (in Python allow={{{allow!r}}})")
        self.problem = problem
        """the message without the option, for callers that have none"""


def parse_allow(text: str) -> frozenset[Allow]:
    """Parse the words of ``--allow``, separated by commas.

    Raises:
        PatchError: a word is none of ALLOW.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in ALLOW:
            raise PatchError(f"{word!r} is none of {', '.join(ALLOW)}.{did_you_mean(word, ALLOW)}")
    return frozenset(word for word in ALLOW if word in words)
