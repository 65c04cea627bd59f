"""A plan as a person reads it: what one process takes with every backend, what fits, and what to do."""

from lorakit.planning.advise import Advice, Row
from lorakit.planning.backends import LAYOUTS
from lorakit.planning.estimate import Candidate, Estimator
from lorakit.planning.machine import GB
from lorakit.planning.memory import CATEGORIES, MARGIN
from lorakit.planning.sharding import base_bytes

HEADS = {
    "base": "base", "adapter": "adapter", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "gathered": "gather", "messages": "sends", "heap": "heap", "process": "process",
}  # fmt: skip


def text_of(weigher: Estimator, advice: Advice) -> str:
    """The whole plan."""
    return "\n".join([*_facts(weigher, advice), "", *_table(weigher, advice), "", *_advice(weigher, advice)])


def _facts(weigher: Estimator, advice: Advice) -> list[str]:
    shapes, work = weigher.shapes(), advice.rows[-1].way.work
    total, trained = sum(p.num_values for p in shapes.base), sum(p.numel for p in shapes.adapter)
    packed = f" packed as {shapes.packing}" if shapes.packing else ""
    batch = work.training
    lines = f"{batch.lines} x {batch.width}" if batch.lines > 1 else f"{batch.width}"
    return [
        f"machine     {weigher.machine.words()}",
        f"base        {weigher.recipe.base.model}, {shapes.architecture}, {_count(total)} parameters in"
        f" {weigher.dtype}{packed}, {base_bytes(shapes) / GB:,.2f} GB",
        f"adapter     {_count(trained)} parameters in float32",
        f"micro-batch {lines} tokens, {batch.num_labels} learnt; {work.micro_batches} of each process in a step",
        f"rows        {work.known}",
    ]


def _table(weigher: Estimator, advice: Advice) -> list[str]:
    on_gpu = weigher.machine.gpu is not None
    size = _in_gigabytes if max(row.way.memory.peak for row in advice.rows) >= 10 * GB else _in_megabytes
    heads = [f"{size(GB)[1]} of a process", *(HEADS[name] for name in CATEGORIES), "peak", "load", "save"]
    heads += [*(["host"] if on_gpu else []), "disk", "s/step", ""]
    rows = [heads]
    for row in advice.rows:
        memory = row.way.memory
        sizes = [*(getattr(memory, name) for name in CATEGORIES), memory.peak, memory.loading, memory.saving]
        sizes += [*([memory.host] if on_gpu else []), memory.disk]
        rows.append([_name(row.way), *(size(one)[0] for one in sizes), _seconds(row.way), _verdict(row, advice)])
    told = [column for column in range(len(heads)) if {row[column] for row in rows[1:]} != {"-"}]
    rows = [[row[column] for column in told] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(told))]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    """The first and the last cell to the left, numbers to the right."""
    numbers = [f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
    return [f"{row[0]:<{widths[0]}}", *numbers, row[-1]]


def _advice(weigher: Estimator, advice: Advice) -> list[str]:
    best, asked = advice.best, weigher.recipe.parallel.backend
    lines = []
    for row in advice.rows:
        if not row.way.fits:
            helps = f"; fits with {row.change.words()}, {_peak(row.change)}" if row.change else ""
            lines.append(f"{row.way.backend:<11} needs {row.way.shortfall}{helps}")
    if refused := [name for name in LAYOUTS if name not in weigher.backends]:
        lines.append(f"left out    {', '.join(refused)}: refused with optimizer {weigher.recipe.train.optimizer}")
    if best is None:
        return lines
    lines.append(f"advice      {best.backend}{_with(best)}: expected to be the fastest that fits, {_peak(best)}")
    lines.append(f"why         {advice.why}")
    if asked not in ("auto", best.backend):
        own = next(row for row in advice.rows if row.way.backend == asked)
        verdict = "fits too" if own.way.fits else "does not fit"
        lines.append(f"the recipe  asks for {asked}, which {verdict}")
    lines.append(f"fits means  with {MARGIN:.0%} to spare; seconds are rough, and for comparing")
    return lines


def cheapest_words(advice: Advice) -> str:
    """What to change when nothing fits."""
    way = advice.cheapest
    if way is None:
        return "and no change known here helps: take a smaller base, shorter rows (data.max_tokens) or more memory"
    return f"the cheapest change: parallel.backend={way.backend}{_and(way)}, {_peak(way)}"


def _name(way: Candidate) -> str:
    return f"{way.backend} x {way.num_processes}" if way.num_processes > 1 else way.backend


def _with(way: Candidate) -> str:
    return f" with {way.words()}" if way.changes else ""


def _and(way: Candidate) -> str:
    return f", {way.words()}" if way.changes else ""


def _peak(way: Candidate) -> str:
    return f"{way.memory.peak / GB:,.2f} GB at the peak of a process"


def _verdict(row: Row, advice: Advice) -> str:
    if row.way is advice.best:
        return "fits, advised"
    return "fits" if row.way.fits else "too large"


def _seconds(way: Candidate) -> str:
    seconds = way.step.total
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def _in_gigabytes(size: int) -> tuple[str, str]:
    """The number, and its unit."""
    return "-" if size == 0 else f"{size / GB:,.2f}" if size >= GB / 200 else "<0.01", "GB"


def _in_megabytes(size: int) -> tuple[str, str]:
    return "-" if size == 0 else f"{size / 1e6:,.0f}" if size >= 5e5 else "<1", "MB"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
