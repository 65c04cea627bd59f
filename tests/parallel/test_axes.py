"""Ranks along three axes at once take the steps of one process; an untrained adapter changes nothing there either."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit.errors import RunError
from lorakit.lora import AdapterSpec
from lorakit.parallel import Group
from lorakit.parallel.axis import axes_of, check_axes
from lorakit.parallel.group import Mesh
from tests.helpers.bases import make_base
from tests.helpers.models import SMALL
from tests.helpers.ranks import Case, run_cases
from tests.helpers.rows import write_uneven_rows
from tests.parallel.test_backends import assert_same

TRAINED: Case = {"name": "trained", "steps": 2, "micro_batch_size": 2, "dropout": 0.2, "untrained": True}
OTHER: Case = {
    "name": "other",
    "steps": 1,
    "micro_batch_size": 2,
    "rank": 5,
    "adapter": {"targets": ["v_proj"]},
    "untrained": True,
}
AXES = {"backend": "ddp", "pipeline": 2, "sequence": 2, "tensor": 2}


@pytest.mark.spread
@pytest.mark.slow
def test_ranks_along_three_axes_take_the_steps_of_one_process(tmp_path: Path, tokenizer: Any) -> None:
    make_base(tmp_path / "base", tokenizer, num_hidden_layers=2)
    write_uneven_rows(tmp_path / "rows.jsonl", 20)

    alone = run_cases(tmp_path, 1, [TRAINED | {"parallel": {"backend": "single"}}])
    shared = run_cases(tmp_path, 8, [case | {"parallel": AXES} for case in (TRAINED, OTHER)])

    assert_same(shared["trained"], alone["trained"])
    # adapters of other layers and ranks: both give the base's loss, to the bit
    assert shared["trained"]["untrained"] == shared["other"]["untrained"]
    assert shared["trained"]["untrained"] == pytest.approx(alone["trained"]["untrained"], rel=1e-6)
    assert shared["trained"]["ranks"][5]["mesh"] == {"data": 1, "pipeline": 2, "sequence": 2, "tensor": 2}


def test_one_rank_along_every_axis_changes_nothing() -> None:
    assert axes_of(Mesh(Group(), Group()), Group(), torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("sizes", "adapter", "problem"),
    [
        ({"sequence": 3}, {}, "parallel.sequence: 3 processes cannot share the 4 heads"),
        ({"pipeline": 3}, {}, "parallel.pipeline: 3 stages need as many layers, and this base has 2"),
        ({"pipeline": 2}, {"new_tokens": {"<new>": 64}}, "parallel.pipeline: .* the base has no '<new>'"),
        ({"tensor": 3}, {}, "parallel.tensor: 3 processes cannot share"),
    ],
)
def test_each_axis_refuses_what_it_cannot_share(sizes: dict[str, int], adapter: dict[str, Any], problem: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    spec = AdapterSpec(**adapter)
    check_axes(model, spec, dict.fromkeys(sizes, 1))
    with pytest.raises(RunError, match=problem):
        check_axes(model, spec, sizes)


@pytest.mark.parametrize(
    ("architecture", "settings", "problem"),
    [
        (
            "qwen3_next",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            "has layers of the kind linear_attention",
        ),
        ("lfm2", {"full_attn_idxs": [1]}, "has layers of the kind conv"),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 8}, "has parameters of each head"),
        ("bloom", {}, "has an attention of its own"),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, "cannot share the 3 heads"),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, "cannot share the 1 heads .* leave it out"),
    ],
)
def test_bases_whose_tokens_meet_elsewhere_cannot_share_lines(
    architecture: str, settings: dict[str, Any], problem: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SMALL | settings))
    check_axes(model, None, {"sequence": 1})
    with pytest.raises(RunError, match=f"parallel.sequence: .*{problem}"):
        check_axes(model, None, {"sequence": 2})
