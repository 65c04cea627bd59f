"""The end of a run: its patch, its record, and what is left of one that is done or thrown away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lorakit.errors import PatchError, RunError
from lorakit.patch import patch_from_model, read_patch, remove_patch, write_patch
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.model_card import model_card
from lorakit.recipe import Recipe
from lorakit.run.display import peak_memory_bytes
from lorakit.run.metrics import draw_loss
from lorakit.run.record import RECORD, RunRecord, versions
from lorakit.training.checkpoint import Checkpoints, Progress
from lorakit.training.job import Job


def finish(job: Job, progress: Progress, record: RunRecord, seconds: float) -> None:
    """Write the patch, then the rest; the checkpoints go last. Everything in the patch is the same at every run."""
    recipe = job.recipe
    best = recipe.train.select == "best" and progress.best_step not in (None, progress.step)
    tensors = {} if best else job.engine.gather()
    ranks = job.engine.group.all_gather(job.engine.observed() | {"peak_memory_bytes": peak_memory_bytes()})
    job.engine.group.run_on_rank_0(lambda: write_all(job, progress, record, seconds, tensors, ranks))


def write_all(
    job: Job, progress: Progress, record: RunRecord, seconds: float, tensors: dict[str, Tensor],
    ranks: list[dict[str, Any]],
) -> None:  # fmt: skip
    """What ``finish`` writes, in the first process. ``tensors`` are the last step's."""
    recipe = job.recipe
    best = recipe.train.select == "best" and progress.best_step not in (None, progress.step)
    tensors = job.checkpoints.adapter_of(progress.best_step or 0) if best else tensors
    losses = {"eval_loss_base": progress.first_eval_loss, "eval_loss": progress.last_eval_loss}
    if best:
        losses["eval_loss"] = progress.best_eval_loss
    facts = {
        "lorakit": versions()["lorakit"],
        "versions": versions(),
        "adapter": {"method": recipe.adapter.method, "rank": recipe.adapter.rank, "alpha": recipe.adapter.alpha},
        "base": job.base_fingerprint,
        "data": job.data_facts(),
        "recipe": recipe.model_dump(mode="json", exclude={"output", "parallel"}),
        "results": {key: value for key, value in losses.items() if value is not None},
        "step": progress.best_step if best else progress.step,
    }
    patch = patch_from_model(
        job.model, tensors, facts=facts, base_model=recipe.base.model, revision=recipe.base.revision
    )
    write_patch(
        job.output, patch, overwrite=True,
        card=model_card(
            job.output.name, recipe.base.model, facts,
            recipe.model_dump(mode="json", exclude_defaults=True, exclude={"output"}),
        ),
    )  # fmt: skip
    draw_loss(job.output / "metrics.jsonl", job.output / "loss.png", job.output.name)
    record.finish(
        steps=progress.step, tokens=progress.tokens, label_tokens=progress.label_tokens, results=facts["results"],
        engine=ranks[0], ranks=ranks[1:], peak_memory_bytes=ranks[0]["peak_memory_bytes"],
        seconds_of_last_start=round(seconds, 2),
        **({"compiled": job.compiled.stats()} if job.compiled else {}),
    )  # fmt: skip
    job.checkpoints.remove()


def discard(output: Path) -> None:
    """Remove what a run or a patch left in the output folder, the patch first; nothing else is touched."""
    if not ((output / RECORD).exists() or (output / CONFIG_FILE).exists()):
        return
    remove_patch(output)
    for name in ("metrics.jsonl", "loss.png", "README.md"):
        (output / name).unlink(missing_ok=True)
    Checkpoints(output / "checkpoints", 1).remove()
    (output / RECORD).unlink(missing_ok=True)


def already_finished(recipe: Recipe, output: Path, say: Callable[[str], None]) -> Path:
    """Leave a finished run alone, once its patch is seen to be whole."""
    try:
        read_patch(output)
    except PatchError as problem:
        raise RunError(f"{problem}\nThis run had finished, but its patch is damaged: --fresh trains it again") from None
    Checkpoints(output / "checkpoints", recipe.train.keep_checkpoints).remove()
    say(f"{output}: trained already from this recipe (its data were not read again); --fresh trains it again")
    return output
