"""The generated text that the built-in base is pre-trained on: conversations and copying drills.

The conversations ask for many things in many wordings (fields in an asked-for order, patterns to fill, a
dictionary to apply, capitals, questions), so that a fine-tuned adapter only has to select and combine skills.
Invariant: a bare sentence, with no instruction before or after it, is only ever answered by a short English
acknowledgement; no fine-tuning format of `scripts.tiny_base.tasks` occurs as an answer to one.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from scripts.tiny_base import lexicon
from scripts.tiny_base.facts import FIELDS, WORDS, any_order, any_sentence, field, invented_name, question, sentence
from scripts.tiny_base.smalltalk import DO_NOT_KNOW, I_SEE, SMALL_TALK
from scripts.tiny_base.tasks import Order, day_last


@dataclass(frozen=True)
class Turn:
    """One turn. `guessable` is False where nothing before the turn determines its text."""

    role: str
    text: str
    guessable: bool = True


Conversation = list[Turn]


def exchange(prompt: str, answer: str) -> Conversation:
    """One user turn and its answer."""
    return [Turn("user", prompt, guessable=False), Turn("assistant", answer)]


def acknowledge(rng: random.Random) -> Conversation:
    """A bare sentence and a friendly word; often a question about it follows."""
    o = any_order(rng)
    answer = rng.choices(
        (
            f"Thank you, I have noted that {o.name} {o.action} {o.count} {o.item}.",
            f"Noted: {o.name} from {o.city} {o.action} {o.item} on {o.day}.",
            f"Good to know that {o.name} {o.action} {o.count} {o.item}!",
        ),
        (6, 1, 1),
    )[0]
    turns = exchange(sentence(o, rng), answer)
    return turns + exchange(*question(o, rng)) if rng.random() < 0.3 else turns


def ask(rng: random.Random) -> Conversation:
    """A sentence with a question about it."""
    o = any_order(rng)
    prompt, answer = question(o, rng)
    return exchange(f"{sentence(o, rng)} {prompt}", answer)


def instruct(text: str, instruction: str, answer: str, rng: random.Random) -> Conversation:
    """A sentence and an instruction: after it, before it, or as a system turn."""
    draw = rng.random()
    if draw < 0.4:
        return exchange(f"{instruction}: {text}", answer)
    if draw < 0.7:
        return exchange(f"{text} {instruction}.", answer)
    return [Turn("system", f"{instruction}.", guessable=False), *exchange(text, answer)]


def some_fields(rng: random.Random) -> list[str]:
    """Two to six fields in random order."""
    return rng.sample(FIELDS, rng.randint(2, 6))


def extract(rng: random.Random) -> Conversation:
    """The asked-for fields, with the asked-for separator and brackets."""
    o, names = any_order(rng), some_fields(rng)
    separator, mark = rng.choice(((", ", "commas"), (" / ", "slashes"), ("; ", "semicolons"), (" - ", "dashes")))
    left, right, shape = rng.choice((("", "", "no"), ("(", ")", "round"), ("[", "]", "square"), ("<", ">", "angle")))
    instruction = f"List {', '.join(names)} with {mark} in {shape} brackets"
    return instruct(sentence(o, rng), instruction, left + separator.join(field(o, n) for n in names) + right, rng)


def keyed(rng: random.Random) -> Conversation:
    """The asked-for fields under keys, as JSON or as `key: value` lines or pairs."""
    o, names = any_order(rng), some_fields(rng)
    keys = [rng.choice(WORDS) if rng.random() < 0.3 else n for n in names]
    wanted = ", ".join(n if n == key else f"{n} as {key}" for n, key in zip(names, keys, strict=True))
    values = [getattr(o, n) for n in names]
    style = rng.choice(("JSON", "JSON", "colons", "equals signs"))
    if style == "JSON":
        answer = json.dumps(dict(zip(keys, values, strict=True)))
    elif style == "colons":
        answer = ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    else:
        answer = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    return instruct(sentence(o, rng), f"Write {style} with {wanted}", answer, rng)


def random_pattern(rng: random.Random) -> str:
    """Slots such as `[name]` in random order, with zero to three random words before each and after the last.

    In some patterns slots are in capitals, such as `[NAME]`, which asks for the field in capitals.
    """
    loud = 0.7 if rng.random() < 0.35 else 0.0
    parts: list[str] = []
    for name in some_fields(rng):
        parts += rng.choices(WORDS, k=rng.choice((0, 0, 1, 1, 2, 3)))
        parts.append(f"[{name.upper() if rng.random() < loud else name}]")
    parts += rng.choices(WORDS, k=rng.choice((0, 0, 1, 1, 2)))
    text = " ".join(parts) + rng.choice((".", "!", "", "", ","))
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def fill(pattern: str, order: Order) -> str:
    """The pattern with each slot replaced by its field."""
    for name in FIELDS:
        pattern = pattern.replace(f"[{name}]", field(order, name))
        pattern = pattern.replace(f"[{name.upper()}]", field(order, name).upper())
    return pattern


def fill_pattern(rng: random.Random) -> Conversation:
    """A pattern to fill."""
    o, pattern = any_order(rng), random_pattern(rng)
    verb = rng.choice(("Fill in", "Use the pattern", "Write as"))
    return instruct(sentence(o, rng), f"{verb} {pattern}", fill(pattern, o), rng)


def follow_examples(rng: random.Random) -> Conversation:
    """Several sentences answered by one unspoken pattern, which only the first answer gives away."""
    pattern = random_pattern(rng)
    turns: Conversation = []
    for i in range(rng.randint(2, 3)):
        o = any_order(rng)
        turns += [Turn("user", sentence(o, rng), guessable=False), Turn("assistant", fill(pattern, o), i > 0)]
    return turns


def change_case(rng: random.Random) -> Conversation:
    """A sentence in capitals or small letters."""
    text = sentence(any_order(rng), rng)
    if rng.random() < 0.75:
        return instruct(text, rng.choice(("In capitals", "Write in capitals", "Shout")), text.upper(), rng)
    return instruct(text, rng.choice(("In small letters", "No capitals")), text.lower(), rng)


def apply_dictionary(rng: random.Random) -> Conversation:
    """A sentence with the words of a small dictionary replaced, in its own or in an asked-for word order."""
    o = any_order(rng)
    names = rng.sample(("action", "item", "day"), rng.randint(1, 3))
    meaning = {field(o, n): rng.choice(lexicon.made_up_words() + lexicon.FILLERS) for n in names}
    action, item, day = (meaning.get(word, word) for word in (o.action, o.item, o.day))
    changed = replace(o, action=action, item=item, day=day)
    known = ", ".join(f"{word} is {new}" for word, new in meaning.items())
    if rng.random() < 0.5:
        return instruct(day_last(o), f"Replace, where {known}", day_last(changed), rng)
    pattern = random_pattern(rng)
    return instruct(sentence(o, rng), f"Use {pattern} where {known}", fill(pattern, changed), rng)


def repeat(rng: random.Random) -> Conversation:
    """Words to say again."""
    text = " ".join(rng.choice((rng.choice(WORDS), invented_name(rng), str(rng.randint(0, 999)))) for _ in range(8))
    text = text[: rng.randint(10, 40)].strip()
    return exchange(f"{rng.choice(('Repeat', 'Say', 'Copy'))}: {text}", text)


def reverse(rng: random.Random) -> Conversation:
    """The words of a sentence from last to first."""
    words = sentence(any_order(rng), rng).rstrip(".").replace(",", "").split()
    return instruct(" ".join(words), "Reverse the words", " ".join(reversed(words)), rng)


def small_talk(rng: random.Random) -> Conversation:
    """A greeting or a question about the model, and its answer."""
    prompt, answer = rng.choice(SMALL_TALK)
    return exchange(prompt, answer)


def listen(rng: random.Random) -> Conversation:
    """A sentence or question of words that mean nothing, and the polite way out."""
    if rng.random() < 0.5:
        return exchange(any_sentence(rng) + rng.choice((".", "!", "")), I_SEE)
    return exchange(any_sentence(rng) + "?", DO_NOT_KNOW)


KINDS: Final[dict[Callable[[random.Random], Conversation], int]] = {
    acknowledge: 14,
    ask: 8,
    extract: 10,
    keyed: 14,
    fill_pattern: 18,
    follow_examples: 10,
    change_case: 9,
    apply_dictionary: 10,
    repeat: 3,
    reverse: 3,
    small_talk: 2,
    listen: 3,
}


def conversations(seed: int) -> Iterator[Conversation]:
    """Conversations without end, of each kind in proportion to its weight in `KINDS`."""
    rng = random.Random(seed)
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        yield rng.choices(kinds, weights)[0](rng)


def copying_drill(num_ids: int, first_id: int, length: int, rng: random.Random) -> list[int]:
    """`length` token ids: a random block of 4 to 30 ids, then the same block over and over."""
    block = [rng.randrange(first_id, num_ids) for _ in range(rng.randint(4, 30))]
    return [block[i % len(block)] for i in range(length)]
