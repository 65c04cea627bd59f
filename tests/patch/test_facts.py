"""lorakit's own facts in a patch are data of others: damaged ones are a PatchError, whatever reads the patch."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import lorakit
from lorakit.data.row_settings import RowSettings
from lorakit.data.token_cache import no_progress
from lorakit.errors import LorakitError
from lorakit.export.servers import prompting_notes
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inspection.diff import diff
from lorakit.inspection.show import show
from lorakit.patch import check_base, read_patch
from lorakit.patch.model import patch_settings
from lorakit.patch.write import model_card
from lorakit.training.eval_loss import eval_losses
from tests.helpers.patches import TENSORS
from tests.helpers.training import train

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**70, 10**400, 1.5, float("nan"), "", "x", [], ["x"], [[1]], [{}], {}, {"x": 1},
    {"x": {"x": ["x"]}}, {"name": "x"},
]  # fmt: skip
"""values that a header may have in place of its own"""


LABELS = [("recipe", "data"), ("recipe", "objective")]
"""sections of a recipe that decide the loss of rows"""


def header(folder: Path) -> dict[str, Any]:
    """Return all facts that a patch of a run can have."""
    start = {"name": "before", "digest": "0" * 32, "step": 3}
    kwargs = {"chat_template_kwargs": {}}
    return {**copy.deepcopy(dict(read_patch(folder).metadata)), "start": start, **kwargs}


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a header, but for those that one beside it stands for."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:1]) if path else ():
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from paths_of(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.copy(value)
    value[path[0]] = new if len(path) == 1 else replaced(value[path[0]], path[1:], new)
    return value


def write(folder: Path, source: Path, facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    save_file(load_file(source / TENSORS), folder / TENSORS, {"format": "pt", "lorakit": json.dumps(facts)})
    return folder


def use(folder: Path, source: Path, base: Path, model: AdaptedModel, rows: Path | None) -> None:
    """Read all facts of a patch, as the commands do. rows: of which a loss is computed."""
    patch = read_patch(folder)
    repr(patch)
    model_card("x", patch, {})
    patch_settings(patch)
    prompting_notes(base, {"x": patch}, None)
    show(str(folder), say=lambda text: None)
    diff(str(folder), str(source), lambda text: None)
    for allow in (frozenset(), frozenset({"base", "template"})):
        with suppress(LorakitError):
            check_base(patch, base, allow=allow)
    model.load_adapter("x", folder, replace="x" in model.adapters, allow={"base", "template"})
    if rows is not None:
        eval_losses(model, {str(rows): ["x"]}, lambda: nullcontext(no_progress), RowSettings(limit=1))


def test_damaged_facts_are_refused_or_change_nothing_that_ends_in_another_error(
    recipe: Callable[..., Path], base: Path, rows: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steps": 2, "warmup_steps": 0}
    source, _ = train(recipe(base={"quantize": "nf4"}, adapter={"targets": ["q_proj", "up_proj"]}, train=settings))
    model = lorakit.load(base, dtype="float32", quantize="nf4")
    facts = header(source)
    use(write(tmp_path / "p", source, facts), source, base, model, rows)
    chooser = random.Random(0)
    failures = []
    for path in paths_of(facts):
        for new in chooser.sample(VALUES, 2):
            damaged = write(tmp_path / "p", source, replaced(facts, path, new))
            try:
                use(damaged, source, base, model, rows if path[:2] in LABELS else None)
            except LorakitError:
                pass
            except Exception as problem:
                failures.append(f"{'.'.join(map(str, path))} = {str(new)[:40]}: {problem!r}")
    assert failures == []
