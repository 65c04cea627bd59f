"""What a plan counts without memory: tensors of a base with its adapter, what a micro-batch allocates, optimizer state."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lorakit.base.from_recipe import adapter_spec
from lorakit.base.loading import load_for_training
from lorakit.data.batch import Batch
from lorakit.errors import BaseModelError
from lorakit.lora import adapter_tensors, attach
from lorakit.lora.inject import checkpoint_tensors
from lorakit.objectives.cross_entropy import CHUNK_BYTES, LossModel, token_scores
from lorakit.ops.fuse import fuse_model
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.engine import local_bytes
from lorakit.planning.activations import LiveBytes, MicroBatch, TracedModel
from lorakit.planning.memory import STATE_SHARES
from lorakit.planning.skeleton import ModelShapes, adapted_skeleton
from lorakit.recipe import AdapterSection, BaseSection, DataSection, Recipe, TrainSection
from tests.helpers.bases import make_base
from tests.helpers.memory_counter import Alive
from tests.helpers.models import CAUSAL, SMALL, build_variant

NARROW = CAUSAL["deepseek_v3"] | {
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
"""multi-head latent attention: values of width 16 and queries of 24"""


def recipe_of(folder: Path, adapter: AdapterSection | None = None, **settings: Any) -> Recipe:
    base = BaseSection(model=str(folder), **settings)
    return Recipe(base=base, adapter=adapter or AdapterSection(), data=DataSection(train="rows"), output="out")


def traced(folder: Path, adapter: AdapterSection | None = None, **settings: Any) -> TracedModel:
    return TracedModel(folder, recipe_of(folder, adapter), torch.float32, **settings)


def packed(*lengths: int) -> MicroBatch:
    total = sum(lengths)
    return MicroBatch(1, total, total, packed=True, masked=len(lengths) > 1, row_lengths=lengths)


def saved_for_backward(model: torch.nn.Module, batch: Batch) -> int:
    """Bytes that a real forward has made and not given back when the head begins."""
    called = LossModel(model)
    called.packed_attention = enable_packed_attention(model)
    head = called.head or model.get_output_embeddings()  # type: ignore[operator]
    hidden: list[int] = []
    with Alive() as alive:
        handle = head.register_forward_pre_hook(lambda *_: hidden.append(alive.bytes))
        token_scores(called, batch).losses.sum()
        handle.remove()
    return hidden[0]


@pytest.mark.parametrize(
    ("architecture", "is_packed"),
    [("llama", True), ("gemma3_text", True), ("gemma3_text", False), ("gpt2", False), ("opt", True), ("phi3", False),
     ("deepseek_v3", True)],
)  # fmt: skip
def test_forward_saves_the_bytes_that_a_real_forward_saves(architecture: str, is_packed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = NARROW if architecture == "deepseek_v3" else CAUSAL[architecture]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings)).save_pretrained(tmp_path)
    lines, width = (1, 60) if is_packed else (3, 40)
    ids = torch.ones(lines, width, dtype=torch.long)
    mask = None if is_packed else torch.ones_like(ids).index_fill(1, torch.tensor([width - 1]), 0)
    rows = (width - 20, 20) if is_packed else ()
    positions = torch.arange(width).repeat(lines, 1)
    batch = Batch(ids, ids, positions, mask, (0,), lines * width, (lines * width,), torch.ones(1), rows)
    model = adapted(recipe_of(tmp_path, AdapterSection(rank=4)), tmp_path, torch.float32)

    form = MicroBatch(lines, width, lines * width, packed=is_packed, masked=True, row_lengths=rows)
    planned = traced(tmp_path, AdapterSection(rank=4)).count(form)

    assert planned.saved == pytest.approx(saved_for_backward(model, batch), rel=0.10)


def adapted(recipe: Recipe, folder: Path, dtype: torch.dtype) -> Any:
    """The base with its adapter as a run has it, in training mode."""
    model = load_for_training(recipe.base, folder, dtype, torch.device("cpu"), sharded=False).model
    spec = adapter_spec(recipe, folder)
    attach(model, spec, seed=0)
    fuse_model(model)
    return model.train()


@pytest.mark.matrix
def test_attention_with_narrow_values_saves_no_scores_on_a_gpu_nor_where_layers_are_recomputed(tmp_path: Path) -> None:
    AutoConfig.for_model("deepseek_v3", architectures=["DeepseekV3ForCausalLM"], **NARROW).save_pretrained(tmp_path)
    for settings in ({"device_type": "cuda"}, {"checkpointing": True}, {"device_type": "cuda", "checkpointing": True}):
        model = traced(tmp_path, **settings)
        assert model.count(packed(320)).saved < 11 * model.count(packed(32)).saved  # 10 times the tokens


@pytest.mark.matrix
def test_equal_layers_are_counted_once_and_multiplied(tmp_path: Path, tokenizer: Any) -> None:
    saved: dict[bool, list[float]] = {False: [], True: []}
    for layers in (3, 6, 9):
        folder = make_base(tmp_path / str(layers), tokenizer, num_hidden_layers=layers)
        for recompute, found in saved.items():
            found.append(traced(folder, checkpointing=recompute).count(packed(64)).saved)
    kept, recomputed = saved[False], saved[True]
    assert kept[2] - kept[1] == kept[1] - kept[0] > recomputed[2] - recomputed[1]
    assert recomputed[2] - recomputed[1] == 3 * 64 * 32 * 4  # of three layers their inputs: 64 tokens of 32 float32


@dataclass(frozen=True)
class Kind:
    """A kind of base and adapter."""

    model: str
    base: dict[str, Any]
    adapter: dict[str, Any]
    dtype: torch.dtype = torch.float32


KINDS = {
    "fp4_with_plain_scales": Kind("llama", {"quantize": "fp4", "double_quantize": False}, {}, torch.bfloat16),
    "int8": Kind("llama", {"quantize": "int8"}, {"init": "pissa"}),
    "fp8": Kind("llama", {"quantize": "fp8"}, {}),
    "some_are_skipped": Kind(
        "llama", {"quantize": "nf4", "skip_modules": ("down_proj",)}, {"modules_to_save": ("down_proj",), "targets": ("q_proj",)}
    ),
    "nf4_and_dora": Kind("llama", {"quantize": "nf4"}, {"method": "dora"}, torch.bfloat16),
    "nf4_and_experts": Kind("mixtral", {"quantize": "nf4"}, {"target_parameters": "all-experts"}),
    "dora_with_dropout": Kind("gpt2", {}, {"method": "rsdora", "dropout": 0.1}),
    "lora_fa": Kind("llama", {}, {"method": "lora_fa"}),
    "experts_transposed": Kind("gpt_oss", {}, {"target_parameters": "all-experts"}),
    "tokens": Kind("llama_tied", {"quantize": "nf4"}, {"trainable_tokens": (5, 7)}),
    "tied": Kind("gpt2", {}, {"targets": ("wte", "c_attn"), "tied_head": "untie"}),
    "whole_head": Kind("llama", {}, {"modules_to_save": ("lm_head",), "targets": ("q_proj",)}, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_base_with_its_adapter_has_and_saves_the_bytes_of_a_real_one(name: str, tmp_path: Path) -> None:
    kind, width = KINDS[name], 60
    build_variant(kind.model).save_pretrained(tmp_path)
    recipe = recipe_of(tmp_path, AdapterSection(rank=4, **kind.adapter), **kind.base)

    planned = TracedModel(tmp_path, recipe, kind.dtype)

    model = adapted(recipe, tmp_path, kind.dtype)
    trainable = adapter_tensors(model)
    known = {id(tensor) for tensor in trainable.values()}
    assert planned.shapes.base_bytes == sum(p.nbytes for p in model.parameters() if id(p) not in known)
    assert planned.shapes.adapter_bytes == sum(tensor.nbytes for tensor in trainable.values())
    fixed = checkpoint_tensors(model).keys() - trainable.keys()
    assert planned.shapes.fixed_bytes == sum(model.get_parameter(name).nbytes for name in fixed)
    ids = torch.arange(width)[None] % 60
    batch = Batch(ids, ids, torch.arange(width)[None], None, (0,), width, (width,), torch.ones(1), (width,))
    assert planned.count(packed(width)).saved == pytest.approx(saved_for_backward(model, batch), rel=0.10)


def test_a_quantised_weight_is_in_floats_for_a_moment_and_counts_for_all_its_values(base: Path) -> None:
    form = packed(4)  # few tokens, so that weights are what is large

    def looked_at(**settings: Any) -> tuple[ModelShapes, LiveBytes]:
        model = TracedModel(base, recipe_of(base, **settings), torch.float32)
        return model.shapes, model.count(form)

    plain, full = looked_at()
    four_bits, dequantised = looked_at(quantize="nf4")
    eight_bits, in_two = looked_at(quantize="int8")
    weight = 48 * 32 * 4  # the largest, in float32
    assert dequantised.saved == in_two.saved == full.saved
    assert full.layer < weight < dequantised.layer <= full.layer + 1.1 * weight
    assert 1.8 * weight < in_two.layer <= full.layer + 2.1 * weight  # bytes become floats in two products
    assert four_bits.base_bytes < eight_bits.base_bytes < plain.base_bytes
    skeletons = [adapted_skeleton(base, recipe_of(base, quantize=name)) for name in ("nf4", "none")]
    assert skeletons[0].facts.num_parameters == skeletons[1].facts.num_parameters
    assert four_bits.quantizing_bytes > weight
    assert plain.quantizing_bytes == 0


def test_a_gpus_chunks_of_logits_are_planned_as_it_computes_them(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **(SMALL | {"vocab_size": 128_256})).save_pretrained(tmp_path)
    cpu, gpu = (
        TracedModel(
            tmp_path, recipe_of(tmp_path), torch.bfloat16, device_type=device_type
        ).count(packed(2048))
        for device_type in ("cpu", "cuda")
    )  # fmt: skip
    chunks = CHUNK_BYTES["cuda"] - CHUNK_BYTES["cpu"]
    assert chunks < gpu.head - cpu.head < 2 * chunks  # float32 logits, and their copy in bfloat16
    assert gpu.layer == cpu.layer


def test_no_summed_weights_of_experts_are_counted(tmp_path: Path) -> None:
    model = build_variant("mixtral")
    model.save_pretrained(tmp_path)
    plain, experts = (
        traced(tmp_path, AdapterSection(targets=("q_proj",), target_parameters=which, rank=1)).count(packed(4))
        for which in ((), "all-experts")
    )
    sizes = [p.nbytes for name, p in model.named_parameters() if p.dim() == 3]
    assert 0 < experts.saved - plain.saved < sum(sizes) / 4  # factors and their products, for backward
    assert experts.layer - plain.layer < min(sizes) / 2


def test_a_part_of_the_weights_has_its_part_of_every_byte_but_those_of_the_head(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", **(SMALL | {"hidden_size": 256, "intermediate_size": 768})).save_pretrained(tmp_path)
    one, two = traced(tmp_path), traced(tmp_path, tensor=2)
    full, part = one.count(packed(256)), two.count(packed(256))
    assert two.shapes.base_bytes == pytest.approx(one.shapes.base_bytes / 2, rel=0.02)  # norms are in each process
    assert full.saved / 2 < part.saved < full.saved
    assert full.head / 2 < part.head < full.head


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # bitsandbytes' own, on CPUs
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_base_with_quantised_files_is_planned_as_it_is_loaded(quantize: str, base: Path, tmp_path: Path) -> None:
    skipped = ["lm_head", "model.layers.1.mlp"]
    how = BitsAndBytesConfig(
        load_in_8bit=quantize == "int8", load_in_4bit=quantize != "int8", bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, llm_int8_skip_modules=skipped,
    )  # fmt: skip
    AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, dtype=torch.float32, device_map="cpu"
    ).save_pretrained(tmp_path)

    shapes = traced(tmp_path).shapes

    model = load_for_training(
        recipe_of(tmp_path).base, tmp_path, torch.float32, torch.device("cpu"), sharded=False
    ).model
    assert shapes.base_bytes == sum(p.nbytes for p in model.parameters())
    assert shapes.quantization == quantize
    assert shapes.quantizing_bytes == 0  # no weight is in floats while it is read
    (tmp_path / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "quantization_config": {"quant_method": "quip"}})
    )
    with pytest.raises(BaseModelError, match="quantised with 'quip'; lorakit reads bitsandbytes"):
        traced(tmp_path)


@pytest.mark.parametrize("name", STATE_SHARES)
def test_the_state_of_an_optimizer_is_its_share_of_the_adapter(name: str, base: Path) -> None:
    shapes = traced(base, AdapterSection(rank=512)).shapes
    adapter = {name: tensor for name, tensor in shapes.tensors.items() if tensor.requires_grad}
    tensors = {name: torch.nn.Parameter(torch.ones(tensor.shape)) for name, tensor in adapter.items()}
    optimizer = build_optimizer(TrainSection(optimizer=name), tensors)
    for tensor in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    real = local_bytes(value for state in optimizer.state.values() for value in state.values())

    assert real > 0
    assert STATE_SHARES[name] * shapes.adapter_bytes == pytest.approx(real, abs=0.04 * shapes.adapter_bytes)
