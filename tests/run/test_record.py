"""Which keys of a recipe may change on a run that goes on: every key is decided, and what is decided is done."""

import json
from pathlib import Path
from typing import Any

from lorakit.errors import RunError
from lorakit.recipe import Recipe
from lorakit.run.record import HARMLESS, LENGTH, RECORD, flatten, open_record

REFUSED = {
    "base.model", "base.revision", "base.tokenizer", "base.dtype", "base.quantize", "base.double_quantize",
    "base.skip_modules",
    "adapter.method", "adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.targets", "adapter.target_parameters",
    "adapter.exclude", "adapter.layers", "adapter.rank_pattern", "adapter.alpha_pattern", "adapter.init",
    "adapter.start_from", "adapter.bias", "adapter.modules_to_save", "adapter.trainable_tokens", "adapter.new_tokens", "adapter.tied_head",
    "data.train", "data.eval", "data.max_tokens", "data.on_long_rows", "data.on_bad_rows", "data.on_shared_rows", "data.loss_on",
    "data.ignore_keys", "data.columns", "data.chat_template", "data.packing", "data.hub_split", "data.hub_eval_split",
    "train.batch_size", "train.learning_rate", "train.schedule", "train.min_learning_rate", "train.schedule_power",
    "train.schedule_cycles", "train.decay_ratio", "train.warmup_steps", "train.warmup_ratio", "train.optimizer",
    "train.loraplus_lr_ratio", "train.beta1", "train.beta2", "train.epsilon", "train.weight_decay",
    "train.max_grad_norm", "train.neftune_alpha", "train.label_smoothing", "train.seed", "objective.name",
    "evaluation.best", "evaluation.max_new_tokens", "evaluation.num_rows",
}  # fmt: skip
"""keys that change the numbers of a run, or what they mean: a new key goes here, or into `HARMLESS` with a reason"""


def values() -> dict[str, Any]:
    recipe = {"base": {"model": "m"}, "data": {"train": "t", "eval": "e"}, "output": "o", "adapter": {}}
    return Recipe.model_validate(recipe).model_dump(mode="json")


def with_change(key: str) -> dict[str, Any]:
    changed = values()
    section, _, name = key.rpartition(".")
    (changed[section] if section else changed)[name] = "another"
    return changed


def keys() -> list[str]:
    names = {
        f"{section}.{name}" if isinstance(part, dict) else section
        for section, part in values().items()
        for name in (part if isinstance(part, dict) else [""])
    }
    return sorted(names)


def opened(folder: Path, key: str, status: str) -> Any:
    record = {"recipe": values(), "status": status, "row_order": 2}
    (folder / RECORD).write_text(json.dumps(record))
    return open_record(folder, with_change(key), fresh=False)


def test_every_key_is_harmless_or_decides_the_length_or_is_refused() -> None:
    parallel = {key for key in keys() if key.startswith("parallel.")}

    assert set(keys()) == REFUSED | HARMLESS | LENGTH | parallel
    assert not REFUSED & (HARMLESS | LENGTH)


def test_a_key_that_changes_the_numbers_is_refused_by_name_and_no_other_key_is(tmp_path: Path) -> None:
    refused = set()
    for key in keys():
        try:
            opened(tmp_path, key, "running")
        except RunError as problem:
            assert f"  {key}" in str(problem)
            refused.add(key)

    assert refused == REFUSED


def test_a_finished_run_goes_on_only_where_its_end_changed(tmp_path: Path) -> None:
    goes_on = {key for key in {*keys()} - REFUSED if not opened(tmp_path, key, "finished").finished}

    assert goes_on == LENGTH


def test_flattened_keys_are_dotted() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
