"""Write docs/rates.md: how well adapters of several ranks learn at several learning rates, on the built-in base.

``python -m scripts.rates_page`` trains each pair on the same rows, in the same order, for the same number of steps, and
compares losses of held-out rows. It takes some ten minutes on two cores.
"""

import contextlib
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import matplotlib.pyplot as plt

import lorakit

RANKS: Final = (1, 8, 64)
RATES: Final = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
ALPHAS: Final[dict[str, Callable[[int], float]]] = {"alpha = 2 r": lambda rank: 2 * rank, "alpha = 16": lambda rank: 16}
STEPS: Final = 60
PAGE: Final = Path("docs/rates.md")
PICTURE: Final = Path("docs/rates.png")
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->"
Losses = dict[str, dict[int, list[float]]]  # rule for alpha -> rank -> held-out loss at each rate


def main() -> None:
    losses: Losses = {}
    for rule, alpha in ALPHAS.items():
        losses[rule] = {rank: [held_out_loss(rank, rate, alpha(rank)) for rate in RATES] for rank in RANKS}
        print(table(rule, losses[rule]), flush=True)
    draw(losses)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    tables = "\n\n".join(table(rule, by_rank) for rule, by_rank in losses.items())
    PAGE.write_text(f"{before}{BEGIN}{tables}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def held_out_loss(rank: int, rate: float, alpha: float) -> float:
    """Return the loss of data/json/eval.jsonl after a run; infinity if a step's loss was not finite."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        recipe = {
            "base": {"model": "builtin:tiny", "dtype": "float32"},
            "adapter": {"rank": rank, "alpha": alpha},
            "data": {"train": "data/json/train.jsonl", "eval": "data/json/eval.jsonl", "max_tokens": 128},
            "train": {"steps": STEPS, "batch_size": 16, "learning_rate": rate, "warmup_steps": 6, "max_grad_norm": 1.0},
            "output": f"{folder}/run",
        }
        try:
            return float(lorakit.train(recipe).evaluations[-1]["eval_loss"])
        except lorakit.LorakitError:
            return math.inf


def table(rule: str, by_rank: dict[int, list[float]]) -> str:
    rows = [f"| {rule}: rank | {' | '.join(f'{rate:g}' for rate in RATES)} |", f"|---|{'---|' * len(RATES)}"]
    for rank, losses in by_rank.items():
        cells = [f"**{loss:.4f}**" if loss == min(losses) else f"{loss:.4f}" for loss in losses]
        rows.append(f"| {rank} | {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(losses: Losses) -> None:
    figure, axes = plt.subplots(1, len(losses), figsize=(11, 4), sharey=True, layout="constrained")
    for place, (rule, by_rank) in zip(axes, losses.items(), strict=True):
        for rank, values in by_rank.items():
            place.loglog(RATES, values, "o-", label=f"rank {rank}")
        place.set(title=rule, xlabel="learning rate", ylabel="held-out loss")
        place.grid(alpha=0.3, which="both")
        place.legend()
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
