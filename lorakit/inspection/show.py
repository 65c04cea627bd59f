"""Show a patch, a run or a base, and whether a patch fits a base."""

import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from lorakit.base.find import find_base
from lorakit.base.quantized import count_parameters, describe_quantization
from lorakit.base.transformers_io import load_skeleton, named_classes
from lorakit.errors import LorakitError, PatchError
from lorakit.files.base_files import open_base_files
from lorakit.files.safetensors import dtype_name
from lorakit.files.text import Say, columns, facts, flatten, say_lines, size
from lorakit.lora.targets import coverage_of
from lorakit.merging.plan import skeleton_for
from lorakit.patch import BaseIdentity, Patch, check_base, check_fits, read_patch, unverified_note
from lorakit.patch.adapter_config import CONFIG_FILE
from lorakit.patch.compatibility import compatible_programs
from lorakit.patch.find import find_patch
from lorakit.patch.fit import fit_problems
from lorakit.patch.own_head import own_head
from lorakit.patch.patch import TENSOR_FILE
from lorakit.patch.same_base import compared_parts, full_digests
from lorakit.planning.skeleton import quantize_skeleton
from lorakit.run.facts import read_run, refusing_foreign_values
from lorakit.run.record import RECORD


def show(path: str, base: str | None = None, say: Say = print, *, full: bool = False) -> None:
    """Print a description of the patch, run or base at ``path``; with ``base``, also the fit of each tensor of a patch.

    ``full``: refuse a patch that has no digests of all values of the base's adapted weights. Raises LorakitError.
    """
    folder = Path(path)  # that of a run or of a base, where no patch has this name
    with suppress(PatchError) if base is None else nullcontext():
        folder = find_patch(path)
    is_patch = base is not None or (folder / CONFIG_FILE).is_file()  # to read what is none says why it is none
    is_run = (folder / RECORD).is_file()
    if is_patch:
        patch = read_patch(folder)
        _show_patch(patch, say)
        if base is not None:
            _show_fit(patch, base, say, full=full)
    if is_run:
        say("") if is_patch else None
        _show_run(folder, say)
    if not (is_patch or is_run):
        if folder.is_dir() and not (folder / "config.json").is_file():
            inside = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_FILE}"))
            more = f"; there are patches inside: {', '.join(inside[:5])}" if inside else ""
            raise LorakitError(f"{folder.absolute()}: neither a patch, nor a run, nor a model folder{more}")
        _show_base(path, say)


def _show_patch(patch: Patch, say: Say) -> None:
    folder, config, recorded = patch.folder, patch.config, patch.metadata
    ranks = sorted({layer.rank for layer in patch.layers.values()})
    full = [*patch.full_shapes]
    kinds = ", ".join(dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in patch.layers))
    quantised = ((recorded.get("base") or {}).get("quantized") or {}).get("name")  # of patches without experts' facts
    head = own_head(patch)
    stacked = any(layer.num_experts > 1 for layer in patch.layers.values()) and not recorded
    origin = None
    if start := recorded.get("start"):
        step = f", step {start['step']}" if "step" in start else ""
        origin = f"{start.get('name')}{step} (digest {start.get('digest')})"
    say_lines(say, facts(
        patch=folder, base=config.base_model, quantised=recorded.get("quantization", quantised), method=config.method,
        rank=", ".join(map(str, ranks)),
        alpha=f"{config.alpha:g}", layers=f"{len(patch.layers)} ({kinds})",
        full=f"{len(full)} ({', '.join(full[:3])}{', ...' if len(full) > 3 else ''})" if full else None,
        parameters=f"{patch.num_parameters:,}", file=f"{(folder / TENSOR_FILE).stat().st_size:,} bytes",
        made_by=f"lorakit {recorded['lorakit']}" if "lorakit" in recorded else "another program (no facts inside)",
        trained_on=", ".join(recorded.get("data", {}).get("train", {}).get("sources", [])) or None,
        new_tokens=", ".join(f"{name} ({token})" for name, token in patch.new_tokens.items()) or None,
        experts="B is read as PEFT writes it, rank by rank (docs/adapters.md)" if stacked else None,
        labels=", ".join(head.labels) or "none: a reward" if head else None,
        step=recorded.get("step"), started_from=origin,
        results=", ".join(f"{key} {value:.4f}" for key, value in recorded.get("results", {}).items()) or None,
    ))  # fmt: skip
    for number, reader in enumerate(compatible_programs(patch)):
        text = f"no: {'; '.join(reader.problems)}" if reader.problems else f"yes: {reader.call}"
        say(f"{'read by' if number == 0 else '':<12} {reader.name:<10} {text}")


def _show_fit(patch: Patch, base: str, say: Say, *, full: bool) -> None:
    folder = find_base(base)
    _, shapes, (named_patch,) = skeleton_for(folder, [patch])
    wrong = dict(fit_problems(named_patch, shapes))
    rows = list[tuple[str, str, str]]()
    there = {name: f"{kind.name} {_by(sizes)}" for name, (kind, sizes) in shapes.layers.items()}
    there |= {name: f"experts {_by(sizes)}" for name, (_, sizes) in shapes.experts.items()}
    for name, layer in named_patch.layers.items():
        update = f"{_by((layer.sizes[0], layer.rank))} {_by((layer.rank, layer.sizes[1]))} s={layer.scale:g}"
        rows.append((name, there.get(name, "-"), update))
    for name, shape in named_patch.full_shapes.items():
        rows.append((name, _by(shapes.parameters.get(name)), f"full {_by(shape)}"))
    for name, token_rows in named_patch.token_rows.items():
        described = f"rows of {len(token_rows.tokens)} tokens {_by(tuple(token_rows.tensor.shape))}"
        rows.append((name, _by(shapes.parameters.get(f"{name}.weight")), described))
    fits = [(*row, "no" if row[0] in wrong else "yes") for row in rows]
    say("")
    say_lines(say, columns([("tensor", "in the base", "in the patch", "shape fits"), *_joined(fits)]))
    check_fits(named_patch, shapes, base)
    if full and full_digests(patch) is None:
        raise PatchError(f"{patch.folder}: holds no digests of all values of its base's weights")
    if (note := unverified_note(patch, base)) is not None:
        say(f"\nfits {base} by its shapes. {note.removeprefix('note: ')}")
        return
    check_base(patch, BaseIdentity(open_base_files(folder), None, patch.metadata.get("chat_template")))
    say(f"\nfits {base}: the base it was trained on, by {compared_parts(patch)}")


def _joined(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that differ only in the numbers of their names: model.layers.{0-31}.mlp.up_proj."""
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name, *cells in rows:
        groups.setdefault((re.sub(r"\d+", "#", name), *cells), []).append([int(n) for n in re.findall(r"\d+", name)])
    joined = []
    for (pattern, *cells), numbers in groups.items():
        name = pattern
        for column in zip(*numbers, strict=True):
            values = sorted(set(column))
            in_a_row = values == list(range(values[0], values[-1] + 1))
            span = f"{values[0]}-{values[-1]}" if in_a_row else f"{len(values)} of them"
            name = name.replace("#", str(values[0]) if len(values) == 1 else f"{{{span}}}", 1)
        joined.append((name, *cells))
    return joined


@refusing_foreign_values()
def _show_run(folder: Path, say: Say) -> None:
    from lorakit.training.checkpoint import Checkpoints  # here, because engines take time to import

    run = read_run(folder)
    record, total, peak = run.record, run.record.get("total_steps"), run.peak_memory_bytes
    status = f"{run.state}: {record['stopped_early']}" if record.get("stopped_early") else run.state
    if run.is_running or not run.has_ended:
        newest = Checkpoints(folder / "checkpoints").newest()
        status += f", saved after step {newest[0].step} of {total}" if newest else f", nothing saved of {total} steps"
        status += "" if run.is_running else "; lorakit train goes on"
    say_lines(say, facts(
        run=folder, status=status, steps=f"{record['steps']} of {total}" if run.has_ended else None,
        dtype=f"{record.get('dtype')} ({record.get('dtype_why')})",
        backend=flatten(run.section("recipe")).get("parallel.backend"),
        starts=len(record.get("starts") or []),
        trained=f"{record['label_tokens']:,} label tokens" if record.get("label_tokens") else None,
        peak_memory=None if peak is None else size(peak), damaged=run.damage or None,
    ))  # fmt: skip


def _show_base(name: str, say: Say) -> None:
    folder = find_base(name)
    files, model = open_base_files(folder), load_skeleton(folder, named_classes(folder))
    quantize_skeleton(folder, model, torch.float32)
    dtypes = sorted({dtype_name(entry.dtype) for shard in files.shards for entry in shard.entries.values()})
    say_lines(say, facts(
        base=name, folder=folder, architecture=type(model).__name__,
        parameters=f"{count_parameters(model):,}", quantised=describe_quantization(model),
        files=f"{len(files.shards)}, {sum(s.path.stat().st_size for s in files.shards):,} bytes, {', '.join(dtypes)}",
    ))  # fmt: skip
    say("")
    kinds = [(kind.name, str(kind.count), kind.example) for kind in coverage_of(model, ()).kinds]
    say_lines(say, columns([("layers", "count", "example"), *kinds], "<>"))


def _by(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"
