"""Describe a run in a few lines before it starts and after it has ended, from measured facts."""

from collections.abc import Mapping
from typing import Any

from lorakit.data import TokenDataset
from lorakit.inference.measures import shown_value
from lorakit.parallel.tensor import IN_PARTS
from lorakit.run.report import perplexity
from lorakit.training.finish import chosen_step, early_stop, other_steps
from lorakit.training.job import NOT_FUSED, Job, same_rows_note
from lorakit.training.progress import Progress
from lorakit.training.updates import step_notes


def announce(text: str) -> None:
    """Print a line without buffering, because output into a pipe is buffered otherwise."""
    print(text, flush=True)


def start_summary(
    job: Job, progress: Progress, ranks: list[dict[str, Any]], why: str, longer: str | None = None
) -> str:
    """Return the lines before training.

    ranks: the layouts of all ranks. why: of the values of `auto` keys. longer: what `go_on` returned.
    """
    recipe = job.recipe
    trainable, total = job.adapted.num_trainable, job.adapted.num_parameters
    settings = recipe.train
    lines = [
        ("base", f"{recipe.base.model}, {job.architecture}, {_count(total)} parameters"),
        ("dtype", f"{job.dtype.name} ({job.dtype.why})"),
        *([("quantised", quantisation)] if (quantisation := _quantisation(job)) else []),
        ("adapter", f"{recipe.adapter.method}, rank {recipe.adapter.rank}, alpha {recipe.adapter.alpha:g}"),
        *([("start from", str(job.start))] if job.start else []),
        ("targets", _targets(job)),
        *(("note", note) for note in job.adapted.notes),
        ("trainable", f"{_count(trainable)} parameters, {trainable / total:.2%} of the base"),
        ("fused", str(job.adapted.fused or NOT_FUSED)),
        ("rows", _rows(job)),
        (
            "held out",
            f"{len(job.eval_batches.rows):,} rows{_by_source(job.eval_batches.rows)}"
            if job.eval_batches
            else "none (data.eval): no held-out loss is measured",
        ),
        *([("objective", "the caller's own (objective=...)")] if job.own_objective else []),
        *([("answers", job.answers.summary())] if job.answers else []),
        *([("note", note)] if (note := _same_rows(job)) else []),
        (
            "steps",
            f"{job.total_steps:,}, with up to {settings.batch_size} rows each;"
            f" {job.total_steps / job.batches.steps_per_epoch:.1f} epochs;"
            f" learning rate {settings.schedule} from {settings.learning_rate:g}",
        ),
        *(("note", note) for note in step_notes(recipe, job.total_steps)),
        *_fallbacks(job),
        *([("auto", why)] if why else []),
        *([("compile", "each layer, in the first steps: they take up to a minute")] if job.compiled else []),
        ("engine", _engine(ranks)),
        *([("per process", _per_process(ranks))] if len(ranks) > 1 else []),
        *([("tensor", _tokens(parts))] if (parts := ranks[0].get("tensor_parts")) else []),
        *([("streamed", f"two layers at a time: {_per_process(ranks)}")] if recipe.parallel.offloads.streams else []),
        ("output", str(job.output)),
    ]
    if progress.step:
        lines.append(("resuming", f"after step {progress.step}"))
    if longer is not None:
        lines.append(("longer", longer))
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _same_rows(job: Job) -> str | None:
    return same_rows_note(job.batches.rows, job.eval_batches.rows if job.eval_batches else None)


def _targets(job: Job) -> str:
    kinds = job.adapted.coverage.kinds
    names = ", ".join(kind.name for kind in kinds if kind.adapted)
    what = "linear layers and experts' parameters" if job.adapted.coverage.experts else "linear layers"
    return f"{sum(kind.adapted for kind in kinds)} of {sum(kind.count for kind in kinds)} {what} ({names})"


def _fallbacks(job: Job) -> list[tuple[str, str]]:
    """Return a line for each fast or lean part that this model or device does not allow, with the reason."""
    loss_model = job.loss_model
    lines = []
    if not loss_model.chunked:
        trainable_head = loss_model.head is None
        why = "something on the output head learns" if trainable_head else "its logits are not what its config says"
        lines.append(("loss", f"from the logits of a whole micro-batch, as {why}"))
    if job.recipe.data.packing and not loss_model.packed_attention:
        lines.append(
            ("packing", "rows are kept apart by a mask over the whole line, as this model's attention asks for")
        )
    if (problem := loss_model.kernel_problem) is not None:
        lines.append(("packing", f"rows attend one by one: the kernel that takes all at once {problem}"))
    return lines


def _quantisation(job: Job) -> str | None:
    """Return scheme and number of the base's quantised layers as text; None if it has none."""
    facts = job.base_fingerprint.get("quantized")
    if facts is None:
        return None
    return f"{facts['name']}{' with quantised scales' if facts['double'] else ''}, {len(facts['layers'])} layers"


def end_summary(job: Job, progress: Progress, stopped: str | None = None) -> str:
    """Return the lines after training: losses on held-out rows, and the files of the run.

    stopped: why a callback stopped the run; None if none did.
    """
    lines = []
    if progress.first_eval_loss is not None and progress.last_eval_loss is not None:
        first = "at the start" if job.start else "base alone"
        rows = [
            (first, progress.first_eval_loss, progress.first_measures),
            ("last step", progress.last_eval_loss, progress.last_measures),
        ]
        if progress.best_eval_loss is not None and progress.best_step != progress.step:
            rows.append((f"best step ({progress.best_step})", progress.best_eval_loss, progress.best_measures))
        for source, loss in progress.last_eval_losses.items():
            rows += [
                (f"{source}, {first}", progress.first_eval_losses[source], _of_source(progress.first_measures, source)),
                (f"{source}, last step", loss, _of_source(progress.last_measures, source)),
            ]
        width = max(20, *(len(name) for name, _, _ in rows))
        names = [name for name in progress.last_measures if "/" not in name]
        lines += [
            "", f"{'held out':<{width}} {'loss':>8} {'perplexity':>11}" + "".join(f"  {name:>8}" for name in names),
        ]  # fmt: skip
        lines += [
            f"{name:<{width}} {loss:>8.4f} {perplexity(loss):>11.3f}" + _measure_columns(names, measures)
            for name, loss, measures in rows
        ]
    if job.compiled:
        text = f"{job.compiled.num_graphs} graphs, the last of them in step {job.compiled.last_step}"
        lines += ["", f"compiled   {text}"]
    if (why := stopped or early_stop(job, progress)) is not None:
        lines += ["", f"stopped    {why}"]
    if not progress.step:
        return "\n".join([*lines, "", "patch      none: no step was trained; the same call goes on"])
    step, base = chosen_step(job.recipe, progress), job.recipe.base
    tokenizer = f" --tokenizer {base.tokenizer}" if base.tokenizer else ""
    lines += [
        "",
        f"patch      {job.output} (step {step} of {job.total_steps}), with loss.png, metrics.jsonl, run.json",
        *(f"also       {_other(job, name, other)}" for name, other in other_steps(job.recipe, progress).items()),
        f"try it     lorakit generate {base.model}{tokenizer} --adapter a={job.output} --prompt '...'",
    ]
    return "\n".join(lines)


def _of_source(measures: Mapping[str, float], source: str) -> dict[str, float]:
    """Return the measures of one source, which are named ``measure/source``."""
    ending = f"/{source}"
    return {name.removesuffix(ending): value for name, value in measures.items() if name.endswith(ending)}


def _measure_columns(names: list[str], measures: Mapping[str, float]) -> str:
    columns = [(shown_value(name, measures[name]) if name in measures else "-", max(8, len(name))) for name in names]
    return "".join(f"  {text:>{width}}" for text, width in columns)


def _other(job: Job, name: str, step: int) -> str:
    """Return where the patch of the best or the last step is, whichever is not the output folder's."""
    folder = job.output / name
    return f"{folder} (step {step})" if folder.is_dir() else f"nothing: the adapter of the {name} step, {step}, is gone"


def _engine(ranks: list[dict[str, Any]]) -> str:
    first = ranks[0]
    alone = f"{first['backend']} on {first['device']}, {first['threads']} threads"
    if len(ranks) == 1:
        return alone
    return f"{alone} each, {len(ranks)} processes through {first['communication']} ({first['engine']})"


def _tokens(parts: dict[str, Any]) -> str:
    """Return which tokens a process has between the blocks of a base that processes share."""
    if parts["tokens"] == IN_PARTS:
        return "norms and residual sums of a part of the tokens in each process"
    return f"norms and residual sums of all tokens in each process: {parts['tokens']}"


def _per_process(ranks: list[dict[str, Any]]) -> str:
    """Return the most bytes of base and adapter on any rank, as text."""
    most = {kind: max(rank[f"{kind}_bytes"] for rank in ranks) for kind in ("base", "adapter")}
    return ", ".join(f"{kind} {size / 1e6:,.2f} MB" for kind, size in most.items())


def _rows(job: Job) -> str:
    counts = job.batches.rows.counts
    text = f"{counts.rows:,}, {counts.tokens:,} tokens, {counts.label_tokens:,} of them label tokens"
    unused = [
        ("truncated", counts.truncated),
        ("dropped as too long", counts.dropped_long),
        ("bad, skipped", counts.bad),
        ("texts split", counts.split),
        ("texts joined", counts.joined),
        ("left out because held out too", counts.shared),
    ]
    text += "".join(f"; {number:,} {what}" for what, number in unused if number)
    return text + _by_source(job.batches.rows)


def _by_source(rows: TokenDataset) -> str:
    """Return the number of rows of each source as text; empty for a single one without a weight."""
    if len(rows.parts) == 1 and rows.parts[0].passes == 1:
        return ""
    parts = []
    for part in rows.parts:
        weight = f" x {part.passes:g} = {part.rows_per_epoch:,} an epoch" if part.passes != 1 else ""
        parts.append(f"{part.name} {len(part.table):,}{weight}" if part.name is not None else weight.strip())
    return f" ({', '.join(parts)})"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
