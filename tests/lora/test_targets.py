"""No silent miss: every pattern matches something, or the error names the nearest thing."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lorakit.errors import TargetError
from lorakit.lora import adapter_tensors, find_targets, inject
from lorakit.lora.targets import AdapterSpec, adapter_notes, coverage_of, layers_left_out
from scripts.zoo.trial import small_config
from tests.helpers.models import build, build_variant


def refused(model: nn.Module, **settings: Any) -> str:
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(TargetError) as caught:
        inject(model, **settings)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert not adapter_tensors(model)
    return str(caught.value)


def test_a_misspelt_target_among_good_ones_is_an_error_with_the_nearest_name() -> None:
    message = refused(build("llama"), targets=["q_proj", "qproj"])

    assert "adapter.targets: 'qproj' matches none of the 15 linear layers" in message
    assert "'q_proj'" in message


def test_every_kind_of_pattern_must_match() -> None:
    message = refused(
        build("llama"), targets=["q_proj"], exclude=["nothing"], layers=[0, 9], rank_pattern={"v_proj": 2},
        alpha_pattern={"k_proj": 2.0},
    )  # fmt: skip

    for part in (
        "adapter.exclude: 'nothing'",
        "no target has layer index 9; found 0 to 1",
        "rank_pattern: 'v_proj'",
        "alpha_pattern: 'k_proj'",
    ):
        assert part in message, part


def test_what_is_not_linear_is_refused_by_name() -> None:
    assert "model.layers.0.mlp and 1 more: a LlamaMLP" in refused(build("llama"), targets=["mlp"])
    assert "norm: a LlamaRMSNorm" in refused(build("llama"), targets=["norm"])


def test_a_linear_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    assert "0: a Doubled" in refused(nn.Sequential(Doubled(2, 2)))
    assert "NonDynamicallyQuantizableLinear" in refused(nn.TransformerEncoderLayer(8, 2, 8))


def test_excluding_everything_is_an_error() -> None:
    assert "nothing is left to adapt of 15 linear layers" in refused(
        build("llama"), exclude=["q_proj"], targets=["q_proj"]
    )


def test_coverage_counts_adapted_layers_by_kind() -> None:
    model = build("llama")
    targets = find_targets(model, AdapterSpec(targets=("q_proj", "mlp.up_proj"), layers=(1,)))

    coverage = coverage_of(model, {target.name for target in targets})

    assert {kind.name: (kind.adapted, kind.count) for kind in coverage.kinds} == {
        "q_proj": (1, 2), "k_proj": (0, 2), "v_proj": (0, 2), "o_proj": (0, 2), "gate_proj": (0, 2), "up_proj": (1, 2),
        "down_proj": (0, 2), "lm_head": (0, 1),
    }  # fmt: skip


@pytest.mark.parametrize("model", ["builtin:tiny", None, torch.zeros(2)])
def test_what_is_no_model_is_refused_in_one_line(model: Any) -> None:
    with pytest.raises(TargetError, match=f"inject: a torch model expected, got a {type(model).__name__}; "):
        inject(model)


def test_a_layer_that_is_the_whole_model_cannot_be_replaced() -> None:
    assert "a layer: nn.Sequential(layer) is a model" in refused(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (
            ["q_proj", "experts.down_proj"],
            "'experts.down_proj' matches none of the 9 linear layers of this base. Experts are",
        ),
        (
            "model.*experts.down_proj",
            "'model.*experts.down_proj' matches none of the 9 linear layers of this base. Experts",
        ),
        (
            ["experts"],
            "model.layers.0.mlp.experts and 1 more: experts; name them in adapter.target_parameters: gate_up",
        ),
        (["q_proj", "router"], "model.layers.0.mlp.router and 1 more: a GptOssTopKRouter"),
    ],
)
def test_experts_and_routers_among_the_targets_are_named_once_with_the_key_for_them(targets: Any, problem: str) -> None:
    said = refused(build_variant("gpt_oss"), targets=targets)

    assert f"adapter.targets: {problem}" in said
    assert len(said.splitlines()) == 1
    assert ("take it out of adapter.targets" if "router" in targets else "adapter.target_parameters") in said


def test_a_convolution_is_called_what_it_is() -> None:
    assert "adapter.targets: 0: a Conv1d" in refused(nn.Sequential(nn.Conv1d(4, 4, 3)), targets=["0"])


def test_running_statistics_that_a_patch_cannot_hold_are_not_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    assert "1 is a BatchNorm1d, whose running statistics" in refused(model, modules_to_save=["1"])
    inject(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)), modules_to_save=["1"])


def test_all_linear_leaves_out_what_it_cannot_adapt_exactly_and_names_it() -> None:
    model = AutoModelForCausalLM.from_config(small_config("llama4"))
    spec = AdapterSpec()
    left_out = layers_left_out(model)
    targets = find_targets(model, spec)

    assert set(left_out.values()) == {"a Llama4Router"}
    assert not {target.name for target in targets} & left_out.keys()
    (note, *_) = adapter_notes(spec, left_out)
    routers = [name for name in left_out if name.endswith("router")]
    assert note.startswith(f"all-linear leaves out {len(left_out)} layer")
    assert f"{len(routers)} such as {routers[0]} (a Llama4Router)" in note
    with pytest.raises(TargetError, match=f"{routers[0]}: a Llama4Router, which lorakit cannot adapt"):
        find_targets(model, AdapterSpec(targets=("router",)))


def test_a_subclass_that_multiplies_as_linear_does_is_one() -> None:
    model = AutoModelForCausalLM.from_config(small_config("falcon"))
    assert {target.name.rpartition(".")[2] for target in find_targets(model, AdapterSpec())} == {
        "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"
    }  # fmt: skip
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is not nn.Linear
