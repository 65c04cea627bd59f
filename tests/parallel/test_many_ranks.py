"""A run's own checks at real sizes: one process with the view of rank k of n, through torch's fake process group.

Shapes, shards and bytes are those of Llama-3-8B's layers; values are zeros, because nothing arrives from other ranks.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from benchmarks.collectives import count_collectives
from lorakit.backends import BACKENDS
from lorakit.data.batch import Batch
from lorakit.errors import RunError
from lorakit.lora import AdapterSpec, attach
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel import Group, StepSettings
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.engine import verify_layout
from lorakit.parallel.fsdp2 import Fsdp2Engine
from lorakit.parallel.group import Mesh
from lorakit.parallel.single import SingleEngine
from lorakit.recipe import ParallelSection, TrainSection
from tests.parallel import rehearsal

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "v_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYER_OF_LLAMA_3_8B = LlamaConfig(
    vocab_size=512, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
TWO_TOKENS = Batch(
    torch.tensor([[1, 2]]), torch.tensor([[2, -100]]), torch.tensor([[0, 1]]), None, (0,), 2, (1,), torch.ones(1), (2,)
)


SIZES = {
    "q_proj": (4096, 4096), "k_proj": (4096, 1024), "v_proj": (4096, 1024), "o_proj": (4096, 4096),
    "gate_proj": (4096, 14336), "up_proj": (4096, 14336), "down_proj": (14336, 4096),
}  # fmt: skip
"""targets -> (columns of A, rows of B)"""


LAYERS: dict[str, tuple[PreTrainedConfig, dict[str, tuple[int, int]]]] = {
    "Llama-3-8B": (LAYER_OF_LLAMA_3_8B, SIZES),
    "Llama-3-70B": (
        LlamaConfig(
            vocab_size=512, hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, num_attention_heads=64,
            num_key_value_heads=8, tie_word_embeddings=False,
        ),
        {"q_proj": (8192, 8192), "v_proj": (8192, 1024), "down_proj": (28672, 8192)},
    ),
    "Gemma-3-27B": (
        Gemma3TextConfig(
            vocab_size=512, hidden_size=5376, intermediate_size=21504, num_hidden_layers=1, num_attention_heads=32,
            num_key_value_heads=16, head_dim=128,
        ),
        {"q_proj": (5376, 4096), "v_proj": (5376, 2048), "down_proj": (21504, 5376)},
    ),
    # one of its three dense layers; one with experts has 22 GB
    "DeepSeek-V3": (
        DeepseekV3Config(vocab_size=512, num_hidden_layers=1),
        {"q_a_proj": (7168, 1536), "q_b_proj": (1536, 24576), "kv_b_proj": (512, 32768), "down_proj": (18432, 7168)},
    ),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig(
            vocab_size=512, hidden_size=2048, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
        {"q_proj": (2048, 4096), "v_proj": (2048, 512), "o_proj": (4096, 2048)},
    ),
}  # fmt: skip
"""base -> one of its layers, and columns of A and rows of B of its targets"""


class Zeros:
    """The weights of a base that is nowhere."""

    def fill(self, name: str, start: int, out: Tensor) -> None:
        out.zero_()


@contextmanager
def one_of(num_ranks: int, rank: int) -> Iterator[tuple[Group, Mesh]]:
    """Give this process the group and mesh of one rank. What it sends goes nowhere, and it receives nothing."""
    with rehearsal.one_of(num_ranks, rank):
        group = Group(rank, num_ranks)
        yield group, Mesh(data=group, replicas=group, grid=torch.arange(num_ranks).view(-1, 1, 1, 1))


def adapted_layer(config: PreTrainedConfig, r: int, targets: tuple[str, ...]) -> nn.Module:
    """A model on meta, with an adapter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).requires_grad_(False)
    for name, buffer in model.model.rotary_emb.named_buffers():
        setattr(model.model.rotary_emb, name, torch.ones(buffer.shape))
    if isinstance(config, Gemma3TextConfig):
        model.model.embed_tokens.embed_scale = torch.ones(())
    spec = AdapterSpec(rank=r, alpha=1.0, targets=targets)
    attach(model, spec, 0, None)
    return model


def layout_after_a_step(
    engine: SingleEngine, r: int, targets: tuple[str, ...] = ATTENTION, config: PreTrainedConfig = LAYER_OF_LLAMA_3_8B
) -> dict[str, Any]:
    """Take one step, which verifies the engine before and after, and return what the rank stores then."""
    optimizer = partial(build_optimizer, TrainSection())
    loss_model = LossModel(adapted_layer(config, r, targets))
    engine.prepare(loss_model, optimizer, StepSettings(0, 1.0, lambda step: 0.01), Zeros())
    engine.step(0, [TWO_TOKENS])
    return engine.layout()


def assert_accepted(num_ranks: int, rank: int, r: int, targets: tuple[str, ...], name: str = "Llama-3-8B") -> None:
    with one_of(num_ranks, rank) as (group, mesh):
        engine = Fsdp2Engine(ParallelSection(backend="fsdp2", processes=num_ranks), CPU, group, mesh)
        config, sizes = LAYERS[name]
        layout = layout_after_a_step(engine, r, targets, config)
    num_tensors = 2 * len(targets)
    assert layout["backend"] == "fsdp2"
    assert layout["optimizer_bytes"] == 2 * layout["adapter_bytes"] + 4 * num_tensors
    # the ranks divide the columns of every A and the rows of every B, so nothing is padded
    assert layout["adapter_bytes"] * num_ranks == sum(4 * r * sum(sizes[target]) for target in targets)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "r", "targets"),
    [
        (8, 0, 2, ATTENTION),
        pytest.param(16, 15, 8, ATTENTION, marks=pytest.mark.matrix),
        pytest.param(64, 0, 4, ALL_LINEAR, marks=pytest.mark.matrix),
        pytest.param(256, 255, 8, ATTENTION, marks=pytest.mark.matrix),
    ],
)
def test_fsdp2_is_accepted_with_many_ranks_for_r(num_ranks: int, rank: int, r: int, targets: tuple[str, ...]) -> None:
    """FSDP2 pads the rows of a tensor to the number of ranks: A of r 8 on 256 ranks would be 32 times as large."""
    assert_accepted(num_ranks, rank, r, targets)


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [8, 16, 64, 256])
@pytest.mark.parametrize("targets", [ATTENTION, ALL_LINEAR])
def test_fsdp2_is_accepted_for_every_r_and_number_of_ranks(num_ranks: int, targets: tuple[str, ...]) -> None:
    for rank, r in product((0, num_ranks - 1), (1, 2, 4, 8, 16, 32, 64)):
        assert_accepted(num_ranks, rank, r, targets)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 256])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Llama-3-8B"])
def test_fsdp2_is_accepted_with_the_shapes_of_larger_bases(name: str, num_ranks: int) -> None:
    for rank, r in product((0, num_ranks - 1), (1, 64)):
        assert_accepted(num_ranks, rank, r, tuple(LAYERS[name][1]), name)


@pytest.mark.parametrize(
    "requested", ["fsdp2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("zero1", "zero2", "zero3"))]
)
def test_ddp_is_refused_as_a_backend_that_shards(requested: str) -> None:
    """By its name, and where it had the other's name, by its bytes."""
    with one_of(16, 3) as (group, mesh):
        layout = layout_after_a_step(SingleEngine(ParallelSection(backend="ddp", processes=16), CPU, group, mesh), 8)
        with pytest.raises(RunError, match=f"requests {requested} with 16 processes, .* it runs as ddp"):
            layout_after_a_step(SingleEngine(ParallelSection(backend=requested, processes=16), CPU, group, mesh), 8)
    shards = [8 * columns // 16 for name in ATTENTION for columns in SIZES[name]]
    shards_base = BACKENDS[requested].shards_base
    base_bytes = layout["base_bytes"] // (16 if shards_base else 1)

    with pytest.raises(RunError) as caught:
        verify_layout(requested, 16, base_bytes, shards, {**layout, "backend": requested})

    assert "851,984 bytes of optimizer state, 53,264 would be its part" in str(caught.value)
    assert ("bytes of the base" in str(caught.value)) == shards_base


def test_ddp_sends_the_adapters_gradients_in_one_message() -> None:
    with one_of(16, 3) as (group, mesh):
        engine = SingleEngine(ParallelSection(backend="ddp", processes=16), CPU, group, mesh)
        layout = layout_after_a_step(engine, 8)
        with count_collectives() as counted:
            engine.step(1, [TWO_TOKENS])
    counts = {"calls": 3, "bytes": layout["adapter_bytes"]}  # of tokens, of gradients, of losses
    sent = counted.counts()
    assert list(sent) == ["all_reduce"]
    assert sent["all_reduce"]["calls"] == counts["calls"]
    assert counts["bytes"] < sent["all_reduce"]["bytes"] < counts["bytes"] + 128


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_no_rank_of_a_rehearsed_run_is_refused_without_need(name: str) -> None:
    """In a process of its own, because the rehearsal replaces what would receive values from other ranks."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        outcomes = pool.apply(rehearsal.try_architecture, (name,))
    unneeded = {outcome: cases for outcome, cases in outcomes.items() if "matches none of" not in outcome}
    assert list(unneeded) == ["accepted"], unneeded
    assert len(unneeded["accepted"]) >= 72
