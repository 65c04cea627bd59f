"""Write the adapter of a run as a patch, in each checkpoint and at its end, and read it back.

Invariant: the bytes of a patch depend on recipe, data, base and step alone, so equal runs write equal patches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lorakit.patch import patch_from_model, read_patch, write_patch
from lorakit.patch.model import adapter_from_patch
from lorakit.patch.model_card import model_card
from lorakit.recipe import Recipe
from lorakit.run.record import versions
from lorakit.training.progress import Progress


@dataclass(frozen=True)
class RunPatches:
    """The patches of one run. model: the adapted model, also sharded. facts: those that are the same at every step."""

    recipe: Recipe
    model: nn.Module
    facts: Mapping[str, Any]

    def write(self, folder: Path, name: str, tensors: Mapping[str, Tensor], step: int, progress: Progress) -> None:
        """Write the patch of a step, in place of an earlier one. ``name``: of the model card. Not collective.

        tensors: all tensors of the adapter after that step, full, by name.

        Raises:
            PatchError: a value is not finite.
        """
        recipe = self.recipe
        facts = {**self.facts, "results": progress.results(step, started="start" in self.facts), "step": step}
        patch = patch_from_model(
            self.model, tensors, metadata=facts, base_model=recipe.base.model, revision=recipe.base.revision
        )
        settings = with_file_names(recipe.model_dump(mode="json", exclude_defaults=True, exclude={"output"}))
        write_patch(folder, patch, overwrite=True, card=model_card(name, recipe.base.model, facts, settings))

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the adapter's tensors in a patch that `write` wrote, to the bit."""
        return adapter_from_patch(self.model, read_patch(folder))


def patch_facts(
    recipe: Recipe, base: Mapping[str, Any], data: Mapping[str, Any], start: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the facts of all patches of a run. base: its fingerprint. start: the patch it began with, or None."""
    return {
        "lorakit": versions()["lorakit"],
        "versions": versions(),
        "adapter": {"method": recipe.adapter.method, "rank": recipe.adapter.rank, "alpha": recipe.adapter.alpha},
        "base": base,
        "data": {key: {**part, "sources": _file_names(part["sources"])} for key, part in data.items()},
        "recipe": with_file_names(recipe.model_dump(mode="json", exclude={"output", "parallel"})),
        **({"start": start} if start else {}),
    }


def with_file_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe whose data files have no absolute paths, because patches are published and paths name people.

    The base's path stays, because PEFT loads the base by it. Of `adapter.start_from` only the folder's name stays.
    """
    data, adapter = settings["data"], settings.get("adapter", {})
    names = {key: _file_names(data[key]) for key in ("train", "eval", "chat_template") if data.get(key) is not None}
    changed = {**settings, "data": {**data, **names}}
    if adapter.get("start_from"):
        changed["adapter"] = {**adapter, "start_from": Path(adapter["start_from"]).absolute().name}
    return changed


def _file_names(names: Any) -> Any:
    """Return the last parts of absolute paths, also in lists and in sources of rows; other values are unchanged."""
    if isinstance(names, str):
        return Path(names).name if Path(names).is_absolute() else names
    if isinstance(names, dict):
        return {**names, "path": _file_names(names["path"])}
    return [_file_names(name) for name in names] if isinstance(names, list | tuple) else names
