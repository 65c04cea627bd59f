"""Describe a run in a few lines: before it starts, with the lines that `check` prints, and after it has ended."""

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from lorakit.data.dataset import TokenDataset, count_shared
from lorakit.files.text import columns, count, count_of, duration
from lorakit.inference.measures import shown_value
from lorakit.lora.own_head import own_head_of
from lorakit.ops.fuse import FuseReport
from lorakit.planning.skeleton import AttachedFacts
from lorakit.recipe import Recipe
from lorakit.recipe.schema import batch_sizes, count_steps, count_warmup_steps
from lorakit.run.display import perplexity
from lorakit.run.metrics import read_metrics
from lorakit.training.learning_rate import rate_note
from lorakit.training.output import Output, early_stop, patch_steps
from lorakit.training.run import Run
from lorakit.training.teacher import TEACHER

Line = tuple[str, str]  # a name of up to ten characters, and a text


def as_text(line: Line) -> str:
    return f"{line[0]:<10} {line[1]}"


def adapter_lines(recipe: Recipe, facts: AttachedFacts, fused: FuseReport) -> Iterator[Line]:
    adapter = recipe.adapter
    total = facts.num_parameters
    coverage = facts.coverage
    yield "base", f"{recipe.base.model}, {facts.architecture}, {count(total)} parameters"
    if facts.quantization is not None:
        yield "quantised", facts.quantization
    yield "adapter", f"{adapter.method}, rank {adapter.rank}, alpha {adapter.alpha:g}"
    layers, experts = ([kind for kind in coverage.kinds if kind.of_experts == which] for which in (False, True))
    parts = (("linear layers", layers), ("experts' parameters", experts))
    counts = [f"{sum(k.adapted for k in own)} of {sum(k.count for k in own)} {what}" for what, own in parts if own]
    adapted = ", ".join(kind.name for kind in coverage.kinds if kind.adapted)
    yield "targets", f"{' and '.join(counts)} ({adapted}), with {coverage.share:.0%} of the parameters in products"
    if frozen := ", ".join(kind.name for kind in experts if not kind.adapted):
        remedy = "" if facts.quantization else "; adapter.target_parameters: all-experts trains them"
        yield "frozen", f"the routed experts {frozen}{remedy}"
    for note in filter(None, [*facts.notes, rate_note(recipe, total)]):
        yield "note", note
    yield "trainable", f"{count(facts.num_trainable)} parameters, {facts.num_trainable / total:.2%} of the base"
    yield "fused", str(fused)


def row_lines(recipe: Recipe, datasets: Mapping[str, TokenDataset]) -> Iterator[Line]:
    rows = datasets["train"]
    eval_rows = datasets.get("eval")
    yield "rows", _rows(rows)
    yield "held out", _rows(eval_rows) if eval_rows else "none (data.eval): no held-out loss is measured"
    yield from _shared_notes(datasets)
    settings = recipe.train
    steps = count_steps(recipe, rows.rows_per_epoch)
    what = "pairs" if rows.counts.pairs else "rows"
    epochs = steps / math.ceil(rows.rows_per_epoch / batch_sizes(recipe)[0])
    yield (
        "steps",
        f"{steps:,}, with up to {settings.batch_size} {what} each; {epochs:.1f} epochs; learning rate"
        f" {settings.schedule} from {settings.learning_rate:g}, after"
        f" {count_of(count_warmup_steps(recipe, steps), 'step')} of warm-up",
    )


def _shared_notes(datasets: Mapping[str, TokenDataset]) -> Iterator[Line]:
    """Yield how many held-out rows are training rows too, if any is."""
    eval_rows = datasets.get("eval")
    if eval_rows and (number := count_shared(datasets["train"], eval_rows)):
        why = ", so their loss says nothing about new ones; name others in data.eval"
        text = f"{number:,} of {len(eval_rows):,} held-out rows are training rows too (the same tokens)"
        yield "note", f"{text}{why if number == len(eval_rows) else ''}"


def start_lines(run: Run, ranks: list[dict[str, Any]], why: str, longer: str | None) -> Iterator[Line]:
    """Yield the lines before training. ranks: all layouts. why: of `auto` values. longer: the result of `go_on`."""
    yield from adapter_lines(run.recipe, run.adapter, run.fused)
    yield "dtype", f"{run.dtype.name} ({run.dtype.why}){', products by oneDNN' if run.products == 'onednn' else ''}"
    if run.inputs.start:
        yield "start from", str(run.inputs.start)
    if (teacher := run.patches.facts.get(TEACHER)) is not None:
        top_k = run.recipe.objective.settings["top_k"]
        yield TEACHER, f"{teacher['name']}, its {top_k} likeliest tokens at each label"
    yield from row_lines(run.recipe, run.inputs.datasets)
    if "own_objective" in run.patches.facts:
        yield "objective", "the caller's own (objective=...)"
    if run.answers:
        yield "answers", str(run.answers)
    yield from _fallbacks(run)
    if why:
        yield "auto", why
    yield from _engine_lines(ranks, streams=run.recipe.parallel.offloads.streams)
    yield "output", str(run.output)
    if run.progress.step:
        yield "resuming", f"after step {run.progress.step}"
    if longer is not None:
        yield "longer", longer


def _fallbacks(run: Run) -> Iterator[Line]:
    """Yield a line for each fast or lean part that this model or device does not allow, with the reason."""
    loss_model = run.loss_model
    if not (loss_model.chunked or loss_model.reads_states or own_head_of(loss_model.model)):
        trainable_head = loss_model.head is None
        why = "something on the output head learns" if trainable_head else "its logits are not what its config says"
        yield "loss", f"from the logits of a whole micro-batch, as {why}"
    if run.padded is not None:
        yield "packing", f"rows are padded instead: {run.padded}"
    elif run.recipe.data.packing and not loss_model.packed_attention:
        yield "packing", "rows are kept apart by a mask over the whole line, as this model's attention asks for"
    if loss_model.row_by_row:
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in loss_model.row_by_row))
        yield "packing", f"row by row in {kinds}, where rows would see each other"
    if (problem := loss_model.kernel_problem) is not None:
        yield "packing", f"rows attend one by one: the kernel that takes all at once {problem}"


def _engine_lines(ranks: list[dict[str, Any]], *, streams: bool) -> Iterator[Line]:
    """Yield the lines of the engine, from the layouts of all ranks. streams: layers of the base are read as needed."""
    first = ranks[0]
    alone = f"{first['backend']} on {first['device']}, {count_of(first['threads'], 'thread')}"
    if len(ranks) == 1:
        yield "engine", alone
    else:
        how = f"{len(ranks)} processes through {first['communication']} ({first['engine']})"
        yield "engine", f"{alone} each, {how}"
        yield "per process", _per_process(ranks)
    if streams:
        yield "streamed", f"two layers at a time: {_per_process(ranks)}"


def _per_process(ranks: list[dict[str, Any]]) -> str:
    most = {kind: max(rank[f"{kind}_bytes"] for rank in ranks) for kind in ("base", "adapter")}
    return ", ".join(f"{kind} {size / 1e6:,.2f} MB" for kind, size in most.items())


def _rows(rows: TokenDataset) -> str:
    """Return the counts of a data set as text, with those of each source where there are several or weighted ones."""
    counts = rows.counts
    number = count_of(counts.pairs, "pair") if counts.pairs else f"{counts.rows:,}"
    text = f"{number}, {counts.tokens:,} tokens, {counts.label_tokens:,} of them label tokens"
    text += "".join(f"; {change}" for change in counts.changes())
    if len(rows.parts) == 1 and rows.parts[0].passes == 1:
        return text
    parts = []
    for part in rows.parts:
        name = f"{part.name} {len(part.table):,} of {part.table.counts.tokens:,} tokens" if part.name else ""
        weight = f"x {part.passes:g} = {part.rows_per_epoch:,} an epoch" if part.passes != 1 else ""
        parts.append(" ".join(filter(None, (name, weight))))
    total = f"; {rows.rows_per_epoch:,} an epoch" if len(parts) > 1 else ""
    return f"{text} ({', '.join(parts)}{total})"


def end_summary(run: Run, output: Output) -> str:
    """Return the lines after training: time of this start, losses, and files."""
    progress = run.progress
    lines = []
    if progress.step:
        losses = [line["loss"] for line in read_metrics(run.output / "metrics.jsonl") if "loss" in line]
        since = " since it went on" if len(output.record.values.get("starts", ())) > 1 else ""
        change = f", loss {losses[0]:.2f} -> {losses[-1]:.2f}" if losses else ""
        lines = ["", f"done in {duration(output.seconds)}{since}{change}"]
    if progress.first is not None and progress.last is not None:
        start = "at the start" if run.inputs.start else "new head" if run.recipe.objective.has_head else "base alone"
        evaluations = [(start, progress.first), ("last step", progress.last)]
        rows = [
            (f"{source}, {label}", one.losses[source], one.measures, f"/{source}")
            for source in progress.last.losses
            for label, one in evaluations
        ]
        if progress.best is not None and progress.best.step != progress.step:
            evaluations.append((f"best step ({progress.best.step})", progress.best))
        rows = [*((label, one.loss, one.measures, "") for label, one in evaluations), *rows]
        has_perplexity = run.loss_model.objective.has_perplexity
        names = [name for name in progress.last.measures if name.rpartition("/")[2] not in progress.last.losses]
        table = [["held out", "loss", *(["perplexity"] if has_perplexity else []), *names]]
        for label, loss, measures, ending in rows:
            values = [(name, measures.get(f"{name}{ending}")) for name in names]
            shown = ["-" if value is None else shown_value(name, value) for name, value in values]
            table.append([label, f"{loss:.4f}", *([f"{perplexity(loss):.3f}"] if has_perplexity else []), *shown])
        lines += ["", *columns(table, "<" + ">" * (len(table[0]) - 1))]
        lines += map(as_text, _shared_notes(run.inputs.datasets))
    if (why := early_stop(run)) is not None:
        lines += ["", f"stopped    {why}"]
    if not progress.step:
        return "\n".join([*lines, "", "patch      none: no step was trained; the same call goes on"])
    step, others = patch_steps(run.recipe, progress)
    lines += [
        "",
        f"patch      {run.output} (step {step} of {run.total_steps}), with loss.png, metrics.jsonl, run.json",
        *(
            f"also       {run.output / name} (step {other})"
            if (run.output / name).is_dir()
            else f"also       nothing: the adapter of the {name} step, {other}, is gone"
            for name, other in others.items()
        ),
        f"try it     {shlex.join(_words_to_try(run))}",
    ]
    return "\n".join(lines)


def _words_to_try(run: Run) -> list[str]:
    """Return the words of the command that tries the patch on the base as it was trained."""
    base = run.recipe.base
    quantize = None if base.quantize == "none" else base.quantize
    options = {"--revision": base.revision, "--tokenizer": base.tokenizer, "--quantize": quantize}
    given = [word for option, value in options.items() if value is not None for word in (option, value)]
    command, *ending = ("generate", "--prompt", "...")
    if run.recipe.objective.name == "embed":
        command, *ending = ("score", "--data", "...")
    return ["lorakit", command, base.model, *given, "--adapter", f"a={run.output}", *ending]
