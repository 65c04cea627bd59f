"""What a patch, a run or a base is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorakit.errors import LorakitError
from lorakit.lora.kinds import is_linear_like
from lorakit.lora.targets import coverage
from lorakit.model import find_base, load_skeleton
from lorakit.patch import Shapes, check_base, check_fits, open_base_files, read_patch
from lorakit.patch.base_files import read_json
from lorakit.patch.config import CONFIG_FILE
from lorakit.patch.patch import TENSOR_FILE
from lorakit.run.checkpoint import Checkpoints
from lorakit.run.record import RECORD, flatten


def show(path: str, base: str | None = None, say: Callable[[str], None] = print) -> None:
    """Print what lies at ``path``; with ``base``, also whether a patch belongs to it.

    Raises:
        LorakitError: nothing known lies there, it is damaged, or the patch does not belong to ``base``.
    """
    folder = Path(path)
    known = False
    if (folder / RECORD).is_file():
        _show_run(folder, say)
        known = True
    if (folder / CONFIG_FILE).is_file():
        say("") if known else None
        _show_patch(folder, base, say)
        known = True
    if not known:
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise LorakitError(f"{folder.absolute()}: neither a patch, nor a run, nor a model folder")
        _show_base(path, say)


def _show_patch(folder: Path, base: str | None, say: Callable[[str], None]) -> None:
    patch = read_patch(folder)
    config, facts = patch.config, patch.facts
    ranks = sorted({layer.rank for layer in patch.layers.values()})
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in patch.layers))
    _table(
        say,
        patch=folder, base=config.base_model, method=config.method, rank=", ".join(map(str, ranks)),
        alpha=f"{config.alpha:g}", layers=f"{len(patch.layers)} ({kinds})", parameters=f"{patch.num_parameters:,}",
        file=f"{(folder / TENSOR_FILE).stat().st_size:,} bytes",
        made_by=f"lorakit {facts['lorakit']}" if "lorakit" in facts else "another program (no facts inside)",
        trained_on=", ".join(facts.get("data", {}).get("train", {}).get("sources", [])) or None,
        step=facts.get("step"),
        results=", ".join(f"{key} {value:.4f}" for key, value in facts.get("results", {}).items()) or None,
    )  # fmt: skip
    if base is None:
        return
    base_folder = find_base(base)
    check_fits(patch, Shapes.of(load_skeleton(base_folder)), base)
    check_base(patch, base_folder)
    say(
        f"{'fits':<12} {base}"
        + ("" if "base" in facts else " by its shapes; the patch does not say which base it is for")
    )


def _show_run(folder: Path, say: Callable[[str], None]) -> None:
    run = read_json(folder / RECORD)
    done, total = run.get("steps"), run.get("total_steps")
    newest = Checkpoints(folder / "checkpoints", 1).newest()
    kept = f"saved after step {newest[0].step} of {total}" if newest else f"nothing saved of {total} steps"
    status = "finished" if done is not None else f"not finished, {kept}; lorakit train goes on"
    _table(
        say,
        run=folder, status=status, steps=f"{done} of {total}" if done is not None else None,
        dtype=f"{run.get('dtype')} ({run.get('dtype_why')})",
        backend=flatten(run.get("recipe") or {}).get("parallel.backend"),
        starts=len(run.get("starts") or []), label_tokens=run.get("label_tokens"),
        peak_memory_bytes=run.get("peak_memory_bytes"),
    )  # fmt: skip


def _show_base(name: str, say: Callable[[str], None]) -> None:
    folder = find_base(name)
    files, model = open_base_files(folder), load_skeleton(folder)
    dtypes = sorted(
        {str(entry.dtype).removeprefix("torch.") for shard in files.shards for entry in shard.entries.values()}
    )
    _table(
        say,
        base=name, folder=folder, architecture=type(model).__name__,
        parameters=f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        files=f"{len(files.shards)}, {sum(s.path.stat().st_size for s in files.shards):,} bytes, {', '.join(dtypes)}",
    )  # fmt: skip
    say(f"\n{'linear layers':<20} {'count':>6}  example")
    names = [key for key, module in model.named_modules() if is_linear_like(module)]
    for kind, _, count in coverage(model, []):
        example = next(key for key in names if key.rpartition(".")[2] == kind)
        say(f"{kind:<20} {count:>6}  {example}")


def _table(say: Callable[[str], None], **rows: Any) -> None:
    for name, value in rows.items():
        if value is not None:
            say(f"{name.replace('_', ' '):<12} {value}")
