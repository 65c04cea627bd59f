"""How a base is cut into stages, and in which order a stage computes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lorakit
from benchmarks.pipeline import idle_share
from lorakit.errors import RunError
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel.group import Group, Mesh
from lorakit.parallel.pipeline.axis import PipelineAxis, cut_stage, split_costs, split_layers
from lorakit.parallel.pipeline.stage import BACKWARD, FORWARD, Stage, StageLossModel, one_forward_one_backward


def llama(**settings: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=50, **settings,
        )
    )  # fmt: skip


def cut(model: nn.Module, rank: int, size: int = 2) -> Stage:
    return cut_stage(model, Mesh(Group(), Group(), pipeline=Group(rank, size)), torch.device("cpu"), 1.0)


def test_a_stage_has_at_most_as_many_micro_batches_waiting_as_stages_come_after_it_and_itself() -> None:
    for stage in range(4):
        waiting, most, done = set[int](), 0, []
        for direction, number in one_forward_one_backward(stage, 4, 6):
            if direction == FORWARD:
                waiting.add(number)
            else:
                waiting.remove(number)
                done.append(number)
            most = max(most, len(waiting))
        assert (most, done, waiting) == (4 - stage, list(range(6)), set())


def test_one_stage_goes_back_at_once() -> None:
    order = list(one_forward_one_backward(0, 1, 2))
    assert order == [(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1)]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 6), (4, 4), (4, 16), (3, 1)])
def test_stages_idle_for_as_long_as_the_formula_says(stages: int, micro_batches: int) -> None:
    assert idle_share(stages, micro_batches) == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_stages_are_cut_by_cost_and_not_by_number() -> None:
    assert split_costs([1, 1, 1, 1], 0.0, 0, 2) == [range(2), range(2, 4)]
    assert split_costs([1, 1, 1, 1], 2.0, 0, 2) == [range(3), range(3, 4)]  # the head is as much as two layers
    assert split_costs([1, 1, 1, 1, 1, 1], 0.0, 4, 2) == [range(4), range(4, 6)]  # no backward through the first four
    assert split_costs([9, 1, 1], 0.0, 0, 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(RunError, match="3 stages need as many layers, and this base has 2"):
        split_costs([1, 1], 0.0, 0, 3)


def test_a_head_for_few_labels_is_a_small_part_of_the_last_stage() -> None:
    model = llama()
    model.lm_head = nn.Linear(16, 500, bias=False)
    assert split_layers(model, 2, label_share=1.0) == [range(3), range(3, 4)]
    assert split_layers(model, 2, label_share=0.01) == [range(2), range(2, 4)]


def test_a_stage_has_its_own_tensors_alone_and_together_they_are_all() -> None:
    whole = set(dict(lorakit.inject(llama()).named_parameters()))
    parts = []
    for rank in range(2):
        model = lorakit.inject(llama())
        stage = cut(model, rank)
        parts.append(set(dict(model.named_parameters())))
        assert (stage.sends_gradient, stage.receives_gradient) == (rank == 1, rank == 0)
    assert parts[0] | parts[1] == whole
    assert parts[0] & parts[1] == {"model.norm.weight"}


def test_no_gradient_goes_to_stages_with_nothing_to_train() -> None:
    model = lorakit.inject(llama(), layers=[3])
    stage = cut(model, 1)
    assert not stage.sends_gradient


@pytest.mark.parametrize(
    ("settings", "adapter", "named"),
    [
        ({"tie_word_embeddings": True}, {"trainable_tokens": [3]}, "embed_tokens"),
        ({}, {"modules_to_save": ["model.norm"]}, "model.norm"),
    ],
)
def test_what_two_stages_would_train_is_refused_by_name(
    settings: dict[str, Any], adapter: dict[str, Any], named: str
) -> None:
    model = lorakit.inject(llama(**settings), targets=["q_proj"], **adapter)
    with pytest.raises(RunError, match=f"parallel.pipeline: .*{named}.* would be in several stages"):
        PipelineAxis.check_fits(model, None, 2)


def test_a_model_of_two_lists_of_layers_is_refused() -> None:
    model = llama()
    model.tower = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(RunError, match="not one list of layers"):
        split_layers(model, 2, 1.0)


SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 50}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 24, "num_key_value_heads": 1},
    "granite": {"intermediate_size": 24, "num_key_value_heads": 1, "embedding_multiplier": 5.0, "residual_multiplier": 0.3},
    "gemma3_text": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8},
    "qwen2": {"intermediate_size": 24, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
    "gpt_neox": {"intermediate_size": 24},
    "qwen3_moe": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_the_logits_of_the_full_model(family: str) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    inputs = {"input_ids": torch.arange(9)[None] * 5, "position_ids": torch.arange(9)[None]}
    with torch.no_grad():
        expected = model(**inputs).logits
        hidden = None
        for rank in range(3):
            part = copy.deepcopy(model)
            loss_model = LossModel(lorakit.inject(part, targets=r".*(q_proj|c_attn|query_key_value)")).eval()
            stage = StageLossModel.of(loss_model, cut(part, rank, 3))
            hidden = stage(**inputs, own_stage=True, hidden=hidden)
    assert torch.equal(hidden, expected)
