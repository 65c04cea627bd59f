"""What the pre-training text talks about: small facts such as `Mira from Oslo ordered 3 lamps on Monday.`"""

import random
from dataclasses import replace
from typing import Final

from scripts.tiny_base import lexicon
from scripts.tiny_base.tasks import Order, day_first, day_last, random_order

FIELDS: Final = ("name", "city", "action", "count", "item", "day")
WORDS: Final = lexicon.FILLERS + lexicon.COLOURS + lexicon.made_up_words() + lexicon.ITEMS + lexicon.ACTIONS


def any_order(rng: random.Random) -> Order:
    """An order from the word lists; now and then with invented names, or with fields that are any words."""
    order = random_order(rng)
    if rng.random() < 0.15:
        order = replace(order, name=invented_name(rng))
    if rng.random() < 0.15:
        order = replace(order, city=invented_name(rng))
    if rng.random() < 0.15:
        order = replace(order, item=rng.choice(WORDS).lower())
    if rng.random() < 0.1:
        order = replace(order, action=rng.choice(WORDS).lower())
    return order


def invented_name(rng: random.Random) -> str:
    """A capitalised word of 3 to 8 random letters, vowels and consonants in turn."""
    vowels, consonants = "aeiou", "bcdfghjklmnprstvwz"
    start = rng.randrange(2)
    letters = [rng.choice((vowels, consonants)[(start + i) % 2]) for i in range(rng.randint(3, 8))]
    return "".join(letters).capitalize()


def sentence(order: Order, rng: random.Random) -> str:
    """The order as one English sentence."""
    draw = rng.random()
    if draw < 0.5:
        return day_last(order)
    if draw < 0.8:
        return day_first(order)
    if draw < 0.9:
        return f"{order.name} {order.action} {order.count} {order.item} in {order.city} on {order.day}."
    return f"On {order.day} in {order.city}, {order.name} {order.action} {order.count} {order.item}."


def field(order: Order, name: str) -> str:
    """A field of the order as text."""
    return str(getattr(order, name))


def question(o: Order, rng: random.Random) -> tuple[str, str]:
    """A question about an order, and its answer in a few words or a sentence."""
    return rng.choice(
        (
            (f"Who {o.action} the {o.item}?", o.name),
            (f"Who {o.action} the {o.item}? Answer in a sentence.", f"{o.name} {o.action} the {o.item}."),
            (f"Where is {o.name} from?", o.city),
            (f"What did {o.name} do?", f"{o.name} {o.action} {o.count} {o.item}."),
            (f"How many {o.item}?", str(o.count)),
            (f"What was {o.action}?", f"{o.count} {o.item}"),
            ("On what day?", o.day),
            ("When was it?", f"It was on {o.day}."),
            ("Which city?", o.city),
        )
    )


def any_sentence(rng: random.Random) -> str:
    """Three to eight words, some plain English and some random letters, without a full stop."""
    letters = "eeeetttaaaoooiiinnnssshhrrrddlluuccmmwwffggyyppbbvk"
    words = []
    for _ in range(rng.randint(3, 8)):
        noise = "".join(rng.choice(letters) for _ in range(rng.randint(2, 9)))
        words.append(rng.choice((rng.choice(lexicon.FILLERS), rng.choice(("the", "is", "a", "of")), noise)))
    text = " ".join(words)
    return text[0].upper() + text[1:]


def vocabulary_words() -> list[str]:
    """The words that get a token of their own, in the spellings that the text uses most."""
    said_loud = [*lexicon.NAMES, *lexicon.CITIES, *lexicon.DAYS, *lexicon.ITEMS, *lexicon.ACTIONS]
    said = [*said_loud, *WORDS, *FIELDS]
    return list(dict.fromkeys([*said, *(" " + w for w in said), *(" " + w.upper() for w in said_loud)]))
