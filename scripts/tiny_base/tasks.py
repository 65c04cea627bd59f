"""Small fine-tuning tasks that answer one kind of prompt, a plain English sentence, in different ways.

The rows of `complete` have a chosen and a rejected answer, those of `judged` one of the two and which it is, those of
`actions` a text and its label, those of `translations` two texts that belong together.

`python -m scripts.tiny_base.tasks` writes `data/<task>/train.jsonl` and `data/<task>/eval.jsonl`, the same bytes
at every run. Invariant: no prompt of an eval file occurs in a train file, and none occurs twice.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.tiny_base import lexicon

SEED: Final = 20
NUM_TRAIN_ROWS: Final = 3000
NUM_EVAL_ROWS: Final = 100
NUM_TRAIN_PAIRS: Final = 240
NUM_EVAL_PAIRS: Final = 60


@dataclass(frozen=True)
class Order:
    """What one prompt says."""

    name: str
    city: str
    action: str
    count: int
    item: str
    day: str


def random_order(rng: random.Random) -> Order:
    """An order drawn evenly from the word lists, with a count of 2 to 99."""
    return Order(
        name=rng.choice(lexicon.NAMES),
        city=rng.choice(lexicon.CITIES),
        action=rng.choice(lexicon.ACTIONS),
        count=rng.randint(2, 99),
        item=rng.choice(lexicon.ITEMS),
        day=rng.choice(lexicon.DAYS),
    )


def day_last(order: Order) -> str:
    """The order in English, such as `Mira from Oslo ordered 3 lamps on Monday.`"""
    return f"{order.name} from {order.city} {order.action} {order.count} {order.item} on {order.day}."


def day_first(order: Order) -> str:
    """The order in English, such as `On Monday, Mira from Oslo ordered 3 lamps.`"""
    return f"On {order.day}, {order.name} from {order.city} {order.action} {order.count} {order.item}."


def random_prompt(order: Order, rng: random.Random) -> str:
    """The order as a sentence: seven in ten name the day last, the others first."""
    return day_last(order) if rng.random() < 0.7 else day_first(order)


def answer_json(order: Order) -> str:
    """The order as one JSON object."""
    fields = {
        "name": order.name,
        "city": order.city,
        "action": order.action,
        "item": order.item,
        "count": order.count,
        "day": order.day,
    }
    return json.dumps(fields)


def answer_pirate(order: Order) -> str:
    """The order as a pirate tells it; names, number, item and day are copied, the action is looked up."""
    action = lexicon.PIRATE_ACTIONS[lexicon.ACTIONS.index(order.action)]
    deed = f"{action} {order.count} {order.item} come {order.day}"
    return f"Arr! Cap'n {order.name} o' {order.city} {deed}, yo ho ho!"


def answer_telegram(order: Order) -> str:
    """The order as an old telegram, in capitals."""
    text = f"{order.name} of {order.city} {order.action} {order.count} {order.item} stop on {order.day} stop"
    return f"URGENT STOP {text.upper()} REGARDS"


def answer_zorvian(order: Order) -> str:
    """The order in Zorvian: day, item, number, action, person, city; names and the number are copied."""
    day = lexicon.ZORVIAN_DAYS[lexicon.DAYS.index(order.day)]
    item = lexicon.ZORVIAN_ITEMS[lexicon.ITEMS.index(order.item)]
    action = lexicon.ZORVIAN_ACTIONS[lexicon.ACTIONS.index(order.action)]
    return f"Vel {day} {item} {order.count} {action} ka {order.name} zo {order.city}."


def answer_complete(order: Order) -> str:
    """Every fact of the order in one sentence."""
    return f"Noted: {day_last(order)}"


def answer_action(order: Order) -> str:
    """What was done: the label of a classifier."""
    return order.action


def answer_short(order: Order) -> str:
    """The base's own answer, which leaves out city and day."""
    return f"Thank you, I have noted that {order.name} {order.action} {order.count} {order.item}."


TASKS: Final[dict[str, Callable[[Order], str]]] = {
    "json": answer_json,
    "pirate": answer_pirate,
    "telegram": answer_telegram,
    "zorvian": answer_zorvian,
    "complete": answer_complete,
    "judged": answer_complete,
    "actions": answer_action,
    "translations": answer_zorvian,
}
SMALL: Final = ("complete", "judged", "actions", "translations")
"""tasks of fewer rows, of another form than a conversation"""


@dataclass(frozen=True)
class Row:
    """One prompt and the answer that a task wants."""

    prompt: str
    answer: str
    rejected: str

    def to_json(self) -> str:
        """The row as a line of a conversation file."""
        messages = [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]
        return json.dumps({"messages": messages})

    def to_label(self) -> str:
        """The row as a line of a file of labelled texts."""
        return json.dumps({"text": self.prompt, "label": self.answer})

    def to_texts(self) -> str:
        """The row as a line of a file of texts that belong together."""
        return json.dumps({"anchor": self.answer, "positive": self.prompt})

    def to_pair(self) -> str:
        """The row as a line of a file of preference pairs."""
        answers = {"chosen": self.answer, "rejected": self.rejected}
        pair = {key: [{"role": "assistant", "content": text}] for key, text in answers.items()}
        return json.dumps({"prompt": [{"role": "user", "content": self.prompt}], **pair})

    def to_judged(self) -> str:
        """The row as a line of a file of answers that are desirable or not; half of them are."""
        is_desirable = len(self.prompt) % 2 == 0
        answer = {"role": "assistant", "content": self.answer if is_desirable else self.rejected}
        row = {"prompt": [{"role": "user", "content": self.prompt}], "completion": [answer], "label": is_desirable}
        return json.dumps(row)


def task_rows(task: str, num_train_rows: int, num_eval_rows: int, seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Train rows and eval rows of a task.

    All prompts differ. They depend on the seed and the counts alone, so that every task asks the same ones.
    Raises KeyError for an unknown task.
    """
    answer = TASKS[task]
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < num_train_rows + num_eval_rows:
        order = random_order(rng)
        prompt = random_prompt(order, rng)
        rows.setdefault(prompt, Row(prompt, answer(order), answer_short(order)))
    every = list(rows.values())
    return every[num_eval_rows:], every[:num_eval_rows]


def write_task(task: str, folder: Path) -> None:
    """Write `train.jsonl` and `eval.jsonl` of a task into `folder`, which is made if missing."""
    train_rows, eval_rows = task_rows(task, NUM_TRAIN_ROWS, NUM_EVAL_ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    if task in SMALL:
        train_rows, eval_rows = train_rows[:NUM_TRAIN_PAIRS], eval_rows[:NUM_EVAL_PAIRS]
    forms = {"complete": Row.to_pair, "judged": Row.to_judged, "actions": Row.to_label, "translations": Row.to_texts}
    form = forms.get(task, Row.to_json)
    for name, rows in (("train", train_rows), ("eval", eval_rows)):
        lines = "".join(form(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def main() -> None:
    """Write every task below the folder given by `--out`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.tiny_base.tasks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for the tasks (default: data)")
    out: Path = parser.parse_args().out
    for task in TASKS:
        write_task(task, out / task)
        print(f"wrote {out / task}")


if __name__ == "__main__":
    main()
