"""Which keys of a recipe may change on a run that goes on: every key is decided, and what is decided is done."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorakit.errors import RunError
from lorakit.files.text import flatten
from lorakit.recipe import Recipe
from lorakit.run.record import EXTENDABLE_KEYS, RECORD, RESUMABLE_KEYS, open_record

REFUSED = {
    "base.model", "base.revision", "base.tokenizer", "base.dtype", "base.quantize", "base.double_quantize",
    "base.skip_modules",
    "adapter.method", "adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.targets", "adapter.target_parameters",
    "adapter.exclude", "adapter.layers", "adapter.rank_pattern", "adapter.alpha_pattern", "adapter.init",
    "adapter.start_from", "adapter.bias", "adapter.modules_to_save", "adapter.trainable_tokens", "adapter.new_tokens", "adapter.tied_head",
    "data.train", "data.eval", "data.max_tokens", "data.on_long_rows", "data.on_bad_rows", "data.on_shared_rows", "data.loss_on",
    "data.ignore_keys", "data.columns", "data.chat_template", "data.chat_template_kwargs", "data.turns", "data.packing", "data.hub_split", "data.hub_eval_split",
    "train.batch_size", "train.learning_rate", "train.schedule", "train.min_learning_rate", "train.schedule_power",
    "train.schedule_cycles", "train.decay_ratio", "train.warmup_steps", "train.warmup_ratio", "train.optimizer",
    "train.loraplus_lr_ratio", "train.beta1", "train.beta2", "train.epsilon", "train.weight_decay",
    "train.max_grad_norm", "train.neftune_alpha", "train.label_smoothing", "train.seed", "objective.name",
    "evaluation.best", "evaluation.lower_is_better",
}  # fmt: skip
"""keys that an update depends on, or the best step so far: a new key goes here, or into `RESUMABLE_KEYS`"""


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
    record = {"recipe": values(), "status": status}
    (folder / RECORD).write_text(json.dumps(record))
    return open_record(folder, with_change(key), fresh=False)


def test_every_key_may_change_or_decides_the_end_or_is_refused() -> None:
    parallel = {key for key in keys() if key.startswith("parallel.")}

    assert set(keys()) == REFUSED | RESUMABLE_KEYS | EXTENDABLE_KEYS | parallel
    assert not REFUSED & (RESUMABLE_KEYS | EXTENDABLE_KEYS)


def test_what_a_measure_is_of_may_not_change_where_that_measure_decides_the_best_step(tmp_path: Path) -> None:
    before = values()
    before["evaluation"] |= {"best": "exact_match"}
    (tmp_path / RECORD).write_text(json.dumps({"recipe": before, "status": "running"}))
    for key, is_refused in (("max_new_tokens", True), ("num_rows", True), ("measures", False)):
        now = {**before, "evaluation": before["evaluation"] | {key: "another"}}
        if is_refused:
            with pytest.raises(RunError, match=f"evaluation.{key}"):
                open_record(tmp_path, now, fresh=False)
        else:
            assert not open_record(tmp_path, now, fresh=False).finished


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

    assert goes_on == EXTENDABLE_KEYS


def test_flattened_keys_are_dotted() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


def test_a_run_that_an_older_lorakit_began_with_compile_goes_on(tmp_path: Path) -> None:
    recipe = values()
    before = {**recipe, "train": recipe["train"] | {"compile": True}}
    (tmp_path / RECORD).write_text(json.dumps({"recipe": before, "status": "running"}))

    assert not open_record(tmp_path, recipe, fresh=False).finished
