"""Add the new tokens of an adapter to a tokenizer: each is one id, and is never split."""

from collections.abc import Mapping, Sequence
from typing import Any

from lorakit.errors import TargetError


def add_new_tokens(tokenizer: Any, names: Sequence[str], num_rows: int | None = None) -> dict[str, int]:
    """Add tokens to a tokenizer in place, and return the id of each, in order.

    ``num_rows``: of the base's embedding. A token that the tokenizer has with an id from there on is new to the base.
    None: the base has all tokens of the tokenizer.
    Raises TargetError: the base has a token already, or a token is named twice, or would not be one id.
    """
    if not names:
        return {}
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    in_base = {name: token for name, token in vocabulary.items() if num_rows is None or token < num_rows}
    problems = [f"{name!r} is named twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    problems += [
        f"{name!r} is a token of this base already, id {in_base[name]}; name it in trainable_tokens to train its row"
        for name in dict.fromkeys(names)
        if name in in_base
    ]
    # not special, because decoding drops special tokens, and an answer shows these
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    last = max(ids.values())
    problems += [
        f"the tokenizer has {name!r} too, id {token}, and the base has no row for it; name it too"
        for name, token in vocabulary.items()
        if name not in in_base and name not in ids and token < last
    ]
    known = set(in_base.values())
    for name, token in ids.items():
        coded = list(tokenizer(f"a{name}b", add_special_tokens=False, verbose=False)["input_ids"])
        is_one = token not in known and coded.count(token) == 1 and tokenizer.decode([token]) == name
        if name not in in_base and not is_one:
            split = f"'a{name}b' is {tokenizer.convert_ids_to_tokens(coded)}"
            problems.append(f"{name!r} does not become one token: {split}; choose another text, such as <|tool|>")
    if problems:
        raise TargetError("\n".join(f"adapter.new_tokens: {problem}" for problem in problems))
    return ids


def check_recorded(tokenizer: Any, recorded: Mapping[str, int]) -> None:
    """Add the new tokens of a patch to a tokenizer. Raises TargetError: they get other ids than in training."""
    vocabulary = tokenizer.get_vocab()
    ids = add_new_tokens(tokenizer, [name for name, token in recorded.items() if vocabulary.get(name) != token])
    if wrong := [name for name, token in ids.items() if recorded[name] != token]:
        now = f"this tokenizer gives it {ids[wrong[0]]}; use the tokenizer of training"
        raise TargetError(f"the token {wrong[0]!r} had the id {recorded[wrong[0]]} in training, and {now}")
