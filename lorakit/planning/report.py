"""The text of a plan: memory of one process with every backend, which backends fit, and the advice."""

from lorakit.planning.advise import Advice, fastest
from lorakit.planning.axes import AxisTraffic, tokens_of_equal_traffic
from lorakit.planning.backends import LAYOUTS
from lorakit.planning.estimate import Candidate, Estimator, install
from lorakit.planning.gpus import GB
from lorakit.planning.machine import Machine
from lorakit.planning.memory import CATEGORIES, MARGIN
from lorakit.planning.sharding import base_bytes

HEADS = {
    "base": "base", "adapter": "adapter", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "gathered": "gather", "messages": "sends", "heap": "heap", "process": "process",
}  # fmt: skip


def plan_text(estimator: Estimator, advice: Advice) -> str:
    """Write the plan: facts of the recipe, a table of all backends, the advice."""
    parts = [_facts(estimator, advice), _table(estimator, advice), layouts_table(estimator, advice)]
    return "\n\n".join("\n".join(part) for part in [*parts, _advice(estimator, advice)] if part)


def describe_cheapest(advice: Advice) -> str:
    """Name the cheapest change for a recipe that does not fit."""
    candidate = advice.cheapest
    if candidate is None:
        tried = [*(estimate.candidate for estimate in advice.backends), *advice.layouts]
        smallest = min(tried, key=lambda one: one.memory.peak)
        recomputing = "" if smallest.checkpointing else " with nothing recomputed"
        return (
            "and no change known here helps: take a smaller base, shorter rows (data.max_tokens) or more memory; the"
            f" smallest{recomputing}, {_layout(smallest)}, needs {smallest.lacks}"
        )
    changes = f", {candidate.overrides()}" if candidate.changes else ""
    return f"the cheapest change: parallel.backend={candidate.backend}{changes}, {_peak(candidate)}"


def describe_uninstalled(advice: Advice) -> str:
    """Name the backends that would fit if their package were installed; empty if there are none."""
    candidates = [estimate.candidate for estimate in advice.backends]
    fitting = [candidate for candidate in candidates if candidate.fits and candidate.missing_package is not None]
    if not fitting:
        return ""
    names, package = ", ".join(candidate.backend for candidate in fitting), fitting[0].missing_package
    return f"; not installed, but would fit: {names} ({install(str(package))})"


def _facts(estimator: Estimator, advice: Advice) -> list[str]:
    shapes, work = estimator.shapes(), advice.backends[-1].candidate.work
    total, trainable = sum(t.num_values for t in shapes.base), sum(t.numel for t in shapes.adapter)
    quantized = f" quantised as {shapes.quantization}" if shapes.quantization else ""
    batch = work.training
    lines = f"{batch.lines} x {batch.width}" if batch.lines > 1 else f"{batch.width}"
    return [
        f"machine     {estimator.machine.describe()}",
        *_assumed_speed(estimator.machine),
        f"base        {estimator.recipe.base.model}, {shapes.architecture}, {_count(total)} parameters in"
        f" {estimator.dtype}{quantized}, {base_bytes(shapes) / GB:,.2f} GB",
        f"adapter     {_count(trainable)} parameters in float32",
        f"micro-batch {lines} tokens, {batch.num_labels} labels; {work.micro_batches} of each process in a step",
        f"rows        {work.source}",
    ]


def _assumed_speed(machine: Machine) -> list[str]:
    if machine.gpu is None or not machine.gpu.rates_of:
        return []
    dtype = ", bfloat16 included," if machine.described else ""
    text = f"that of an {machine.gpu.rates_of}{dtype} is assumed: seconds compare backends, and say nothing of this GPU"
    return [f"speed       {text}"]


def _table(estimator: Estimator, advice: Advice) -> list[str]:
    on_gpu = estimator.machine.gpu is not None
    candidates = [estimate.candidate for estimate in advice.backends]
    size = _in_gigabytes if max(candidate.memory.peak for candidate in candidates) >= 10 * GB else _in_megabytes
    heads = [f"{size(GB)[1]} of a process", *(HEADS[name] for name in CATEGORIES), "peak", "load", "save"]
    heads += [*(["host"] if on_gpu else []), "disk", "s/step", ""]
    rows = [heads]
    for candidate in candidates:
        memory = candidate.memory
        sizes = [*(getattr(memory, name) for name in CATEGORIES), memory.peak, memory.loading, memory.saving]
        sizes += [*([memory.host] if on_gpu else []), memory.disk]
        cells = [size(num_bytes)[0] for num_bytes in sizes]
        rows.append([_name(candidate), *cells, _seconds(candidate), _verdict(candidate, advice)])
    columns = [column for column in range(len(heads)) if {row[column] for row in rows[1:]} != {"-"}]
    rows = [[row[column] for column in columns] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def layouts_table(estimator: Estimator, advice: Advice) -> list[str]:
    """Return a table of the layouts with axes: of those with the same axes, the fastest that fits or the smallest.

    Below it, why an axis is missing, and when `tensor` sends less than gathering the base. For a recipe that names its
    axes, a row for each backend.
    """
    own = [estimate.candidate for estimate in advice.backends if estimate.candidate.axes]
    by_axes: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in advice.layouts:
        by_axes.setdefault(tuple(candidate.axes), []).append(candidate)
    shown = own or [
        fastest([one for one in same if one.can_run]) or min(same, key=lambda one: one.memory.peak)
        for same in by_axes.values()
    ]
    if not shown:
        return []
    size = _in_gigabytes if max(candidate.memory.peak for candidate in shown) >= 10 * GB else _in_megabytes
    rows = [
        [f"{size(GB)[1]} of a process", "base", "activ", "peak", "s/step", "idle", "", "sent in a step by a process"]
    ]
    for one in shown:
        sizes = (one.memory.base, one.memory.activations, one.memory.peak)
        idle = f"{one.idle:.0%}" if one.idle else "-"
        sent = ", ".join(f"{axis} {each.num_messages:,} x {_mean_size(each)}" for axis, each in one.traffic.items())
        verdict = "fits, advised" if one is advice.best else "fits" if one.fits else "too large"
        rows.append([_layout(one), *(size(each)[0] for each in sizes), _seconds(one), idle, verdict, sent])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *numbers, verdict, sent in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-2], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells, f"{verdict:<{widths[-2]}}", sent]).rstrip())
    return lines if own else [*lines, *_axis_notes(estimator, advice)]


def _axis_notes(estimator: Estimator, advice: Advice) -> list[str]:
    allowed, _ = estimator.allowed()
    notes = [f"no {axis:<8} {why.removeprefix(f'parallel.{axis}: ')}" for axis, why in allowed.refusals.items()]
    num_ranks = max(allowed.sizes["tensor"], default=1)
    if num_ranks > 1:
        equal = tokens_of_equal_traffic(estimator.shapes(), estimator.dtype, num_ranks)
        work = next(estimate.candidate.work for estimate in reversed(advice.backends))
        own = work.training.num_tokens
        notes.append(
            f"tensor: {num_ranks} sends less than gathering the base where a process has fewer than {equal:,.0f} tokens"
            f" in a micro-batch; here it has {own:,}"
        )
    return notes


def _layout(candidate: Candidate) -> str:
    return ", ".join([_name(candidate), *(f"{axis} {size}" for axis, size in candidate.axes.items())])


def _mean_size(traffic: AxisTraffic) -> str:
    size = traffic.num_bytes / max(1, traffic.num_messages)
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    """Align the first and the last cell to the left, numbers to the right."""
    numbers = [f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
    return [f"{row[0]:<{widths[0]}}", *numbers, row[-1]]


def _advice(estimator: Estimator, advice: Advice) -> list[str]:
    best, requested = advice.best, estimator.recipe.parallel.backend
    lines = []
    for estimate in advice.backends:
        candidate, change = estimate.candidate, estimate.cheapest_change
        if not candidate.can_run:
            helps = f"; fits with {change.overrides()}, {_peak(change)}" if change else ""
            lines.append(f"{candidate.backend:<11} needs {candidate.lacks}{helps}")
    if refused := [name for name in LAYOUTS if name not in estimator.backends]:
        settings = estimator.recipe.train
        reasons = [] if settings.optimizer == "adamw" else [f"optimizer {settings.optimizer}"]
        reasons += [] if settings.eval_generate is None else ["eval_generate"]
        reasons += ["train.compile"] if settings.compile else []
        parallel = estimator.recipe.parallel
        reasons += [f"parallel.{axis}" for axis in ("pipeline", "tensor") if getattr(parallel, axis) > 1]
        why = " and ".join(reasons) or "other keys of the recipe"
        lines.append(f"left out    {', '.join(refused)}: refused with {why}")
    if best is None:
        return lines
    changes = f" with {best.overrides()}" if best.changes else ""
    among = f" of {best.num_processes} processes" if best.num_processes > 1 else ""
    lines.append(f"advice      {best.backend}{changes}: expected to be the fastest{among} that fits, {_peak(best)}")
    lines.append(f"why         {advice.why}")
    if requested not in ("auto", best.backend):
        own = next(estimate.candidate for estimate in advice.backends if estimate.candidate.backend == requested)
        lines.append(f"the recipe  asks for {requested}, which {_requested_verdict(own)}")
    lines.append(f"fits means  with {MARGIN:.0%} to spare; seconds are rough, and for comparing")
    return lines


def _name(candidate: Candidate) -> str:
    return f"{candidate.backend} x {candidate.num_processes}" if candidate.num_processes > 1 else candidate.backend


def _peak(candidate: Candidate) -> str:
    return f"{candidate.memory.peak / GB:,.2f} GB at the peak of a process"


def _verdict(candidate: Candidate, advice: Advice) -> str:
    if candidate is advice.best:
        return "fits, advised"
    size = "fits" if candidate.fits else "too large"
    if candidate.missing_package is None:
        return size
    return "not installed" if candidate.fits else f"{size}, not installed"


def _requested_verdict(candidate: Candidate) -> str:
    size = "fits too" if candidate.fits else "does not fit"
    if candidate.missing_package is None:
        return size
    return f"is not installed{'' if candidate.fits else ' and does not fit'}: {install(candidate.missing_package)}"


def _seconds(candidate: Candidate) -> str:
    seconds = candidate.step.total
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def _in_gigabytes(size: int) -> tuple[str, str]:
    """Return the number and its unit."""
    return "-" if size == 0 else f"{size / GB:,.2f}" if size >= GB / 200 else "<0.01", "GB"


def _in_megabytes(size: int) -> tuple[str, str]:
    return "-" if size == 0 else f"{size / 1e6:,.0f}" if size >= 5e5 else "<1", "MB"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
