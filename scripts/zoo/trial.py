"""Train, merge and ask a shrunk model of one architecture, and compare each with transformers and PEFT.

The recipe is the default one, in float32 so that a difference is one of kind and not of rounding, on rows of token ids.
"""

import contextlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lorakit.run.metrics import read_metrics
from scripts.zoo.shrink import shrink

TOLERANCE: Final = 2e-4  # relative to the largest value: of float32, through two layers
MAX_PARAMETERS: Final = 40_000_000
NUM_ROWS: Final = (14, 6)  # trained, held out
NEW_TOKENS: Final = 6
SHOWN: Final = ("targets ", "packing ", "note ")  # beginnings of a run's lines


@dataclass
class Outcome:
    """What came of one architecture.

    state: trained, refused, failed (an error that lorakit does not say), unlike (it differs from transformers or PEFT)
    or absent (no small model of it). why: of all but the first. differences: of each comparison, relative. lines: what
    the run says of its layers and rows. peft: why PEFT would compute something else.
    """

    name: str
    state: str
    why: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    peft: str = ""


def try_architecture(name: str, tokenizer: Any, folder: Path) -> Outcome:
    """Return what the default recipe makes of a small model of an architecture. folder: for all its files."""
    from lorakit import LorakitError
    from lorakit.patch import read_patch
    from lorakit.patch.compatibility import peft_problems

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            base = make_small(name, tokenizer, folder / "base")
        except Exception as problem:
            return Outcome(name, "absent", _text(problem))
        outcome = Outcome(name, "trained")
        stage = "train"
        try:
            rows = token_rows(len(tokenizer))
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
                run = _train(base, rows, folder / "run")
                outcome.lines = [line for line in said.getvalue().splitlines() if line.startswith(SHOWN)]
                outcome.peft = "; ".join(peft_problems(read_patch(run)))
                for stage, compare in COMPARISONS.items():
                    outcome.differences[stage] = compare(base, folder / "run", rows)
        except LorakitError as problem:
            outcome.state, outcome.why = "refused", f"{stage}: {_text(problem)}"
        except Exception as problem:
            outcome.state, outcome.why = "failed", f"{stage}: {type(problem).__name__}: {_text(problem)}"
        if outcome.peft:  # a wrong yes and a wrong no are both a difference
            outcome.differences["PEFT"] = 0.0 if outcome.differences.get("PEFT", 0.0) > TOLERANCE else math.inf
        unlike = [stage for stage, difference in outcome.differences.items() if not difference <= TOLERANCE]
        if outcome.state == "trained" and unlike:
            outcome.state, outcome.why = "unlike", ", ".join(f"{one} {outcome.differences[one]:.2g}" for one in unlike)
    return outcome


def small_config(name: str, vocabulary: int = 64, tokens: Mapping[str, int] | None = None) -> Any:
    """Return an architecture's own config in small. tokens: ids by their keys, such as `eos_token_id`."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    return kind.from_dict(shrink(kind().to_dict(), vocabulary, tokens or {}))


def make_small(name: str, tokenizer: Any, folder: Path) -> Path:
    """Write a small random model of an architecture, whose norms and biases are no ones and zeros."""
    from lorakit.base._internals import model_factory

    tokens = {f"{which}_token_id": getattr(tokenizer, f"{which}_token_id") for which in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    config = small_config(name, len(tokenizer), tokens)
    model = model_factory(config)[0].from_config(config)
    if model.num_parameters() > MAX_PARAMETERS:
        raise ValueError(f"{model.num_parameters():,} parameters, although it was shrunk")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.05)
        model.eval()(input_ids=torch.arange(3, 27).reshape(2, 12))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def token_rows(vocabulary: int) -> list[dict[str, Any]]:
    """Rows of several lengths; the loss is on all tokens but the first two."""
    generator = torch.Generator().manual_seed(1)
    lengths = [5 + 3 * index % 17 for index in range(sum(NUM_ROWS))]
    ids = [torch.randint(5, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "mask": [0, 0] + [1] * (len(row) - 2)} for row in ids]


def _train(base: Path, rows: Sequence[Mapping[str, Any]], output: Path) -> Path:
    import lorakit

    recipe = {
        "base": {"model": str(base), "dtype": "float32"},
        "data": {"train": rows[: NUM_ROWS[0]], "eval": rows[NUM_ROWS[0] :]},
        "train": {"steps": 3, "learning_rate": 0.02},
        "output": str(output),
    }
    return lorakit.train(recipe).folder


def _reference(folder: Path) -> nn.Module:
    from transformers import AutoConfig

    from lorakit.base._internals import model_factory

    config = AutoConfig.from_pretrained(folder)
    model: nn.Module = model_factory(config)[0].from_pretrained(folder, dtype=torch.float32).eval()
    return model


def _apart(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max() / two.abs().max())


def _inputs(rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [torch.tensor([row["input_ids"]]) for row in rows[-3:]]


@torch.no_grad()
def _held_out_loss(base: Path, run: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Compare the held-out loss before the first step with that of transformers, row by row."""
    model = _reference(base)
    total = count = 0.0
    for row in rows[NUM_ROWS[0] :]:
        ids = torch.tensor([row["input_ids"]])
        log_probabilities = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses = -log_probabilities.gather(1, ids[0, 1:, None])[1:]  # the second token has no loss
        total += float(losses.sum())
        count += len(losses)
    first = float(read_metrics(run / "metrics.jsonl")[0]["eval_loss"])
    return abs(first - total / count) / abs(total / count)


@torch.no_grad()
def _peft_logits(base: Path, run: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Compare logits of base and patch with those of PEFT, which reads the patch."""
    import peft

    import lorakit

    ours = lorakit.load(base, {"a": run}, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(_reference(base), str(run)).eval()
    return max(_apart(ours(input_ids=ids, adapters="a").logits, theirs(input_ids=ids).logits) for ids in _inputs(rows))


@torch.no_grad()
def _learnt(base: Path, run: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Compare the loss of the last step with the first: 0 if it fell."""
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    return 0.0 if losses[-1] < losses[0] else math.inf


@torch.no_grad()
def _merged_logits(base: Path, run: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Compare logits of the merged model in transformers with those of base and patch."""
    import lorakit

    merged = run.parent / "merged"
    lorakit.merge(base, run, out=merged)
    ours, theirs = lorakit.load(base, {"a": run}, dtype=torch.float32), _reference(merged)
    return max(_apart(theirs(input_ids=ids).logits, ours(input_ids=ids, adapters="a").logits) for ids in _inputs(rows))


@torch.no_grad()
def _greedy(base: Path, run: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Count the tokens of greedy answers, of base and patch in one batch, that the merged model would not choose."""
    import lorakit

    model = _reference(run.parent / "merged")
    ours = lorakit.load(base, {"a": run}, dtype=torch.float32)
    prompts = [row["input_ids"] for row in rows[-3:]]
    answers = ours.generate_ids(prompts, ["a"] * 3, max_new_tokens=NEW_TOKENS)
    different = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for token in answer:
            different += int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) != token
            ids.append(token)
    return float(different)


def _text(problem: Exception) -> str:
    return " ".join(str(problem).split())


COMPARISONS: Final = {
    "held-out loss": _held_out_loss,
    "training": _learnt,
    "PEFT": _peft_logits,
    "merged": _merged_logits,
    "answers": _greedy,
}
