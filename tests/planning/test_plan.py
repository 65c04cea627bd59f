"""The plan: what a recipe takes before it is run, beside what it takes; what fits; and what `auto` makes of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.find import find_base
from lorakit.base.loading import load_for_training
from lorakit.cli import main
from lorakit.data.batch import Batch
from lorakit.errors import BaseModelError, LorakitError, RunError
from lorakit.lora import AdapterSpec, adapter_tensors, attach, find_targets, fixed_tensors
from lorakit.objectives.cross_entropy import CHUNK_BYTES, LossModel, token_scores
from lorakit.ops.fuse import fuse_model
from lorakit.ops.packed_attention import enable_packed_attention
from lorakit.parallel.accounting import local_bytes
from lorakit.parallel.optimizer import build_optimizer
from lorakit.planning import Machine, machine_with_gpu, make_plan, resolve_auto
from lorakit.planning.activations import ActivationTracer, LiveBytes, MicroBatch
from lorakit.planning.gpus import GB, GPUS, Gpu, named_gpu
from lorakit.planning.machine import cgroup_rooms
from lorakit.planning.memory import MARGIN
from lorakit.planning.model_shapes import ModelShapes, TensorShape, read_shapes
from lorakit.planning.sharding import OptimizerStateBytes, adapter_bytes, base_bytes, optimizer_state_bytes, unsharded
from lorakit.recipe import AdapterSection, BaseSection, Recipe, load_recipe
from tests.helpers.bases import make_base
from tests.helpers.fork_server import run_python
from tests.helpers.memory_counter import Alive
from tests.helpers.models import SMALL, build, build_variant
from tests.helpers.rows import write_rows

BACKENDS = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
H200 = machine_with_gpu("H200", 2, 1, None)
Write = Callable[..., Path]


def small(machine: Machine, gigabytes: float) -> Machine:
    """The same machine with GPUs of less memory."""
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, memory_bytes=round(gigabytes * GB)))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8 billion parameters as its config describes it: there are no weights, and no tokenizer."""
    folder = tmp_path_factory.mktemp("large")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def of_large(large: Path, recipe: Write) -> Callable[..., Recipe]:
    """A recipe for the large base, whose rows are elsewhere."""

    def load(*overrides: str, tokens: int = 2048, rows: int = 1) -> Recipe:
        data = {"train": "/elsewhere/rows.jsonl", "eval": None, "max_tokens": tokens}
        train = {"steps": 10, "batch_size": 2 * rows, "micro_batch_size": rows, "warmup_steps": 2}
        path = recipe(base={"model": str(large), "dtype": "bfloat16"}, data=data, train=train)
        return load_recipe(path, ("parallel.backend=ddp", "parallel.processes=2", *overrides))

    return load


def of(folder: Path, **settings: Any) -> BaseSection:
    return BaseSection(model=str(folder), **settings)


def memory(plan: Any, backend: str) -> Any:
    return next(row.candidate.memory for row in plan.advice.backends if row.candidate.backend == backend)


# --- what is alive in a micro-batch ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "opt", "phi3"])
def test_what_forward_keeps_is_what_a_real_one_keeps(architecture: str, packed: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build(architecture).save_pretrained(base)
    lines, width = (1, 60) if packed else (3, 40)
    ids = torch.ones(lines, width, dtype=torch.long)
    mask = None if packed else torch.ones_like(ids).index_fill(1, torch.tensor([width - 1]), 0)
    rows = (width - 20, 20) if packed else ()
    batch = Batch(ids, ids, torch.arange(width).repeat(lines, 1), mask, (0,), lines * width, lines * width, rows)
    section = AdapterSection(rank=4)
    model = load_for_training(of(base), base, torch.float32, torch.device("cpu"), sharded=False).model
    spec = AdapterSpec(**section.model_dump(exclude={"start_from"}))
    attach(model, find_targets(model, spec), spec, seed=0)
    fuse_model(model)
    model.train()

    form = MicroBatch(lines, width, lines * width, packed=packed, masked=True, row_lengths=rows)
    planned = ActivationTracer(base, of(base), section, torch.float32, checkpointing=False).training(form)

    real = saved_for_backward(model, batch)
    assert real > 0
    assert planned.saved == pytest.approx(real, rel=0.10)


def test_layers_that_are_alike_are_counted_once_and_multiplied(tmp_path: Path, tokenizer: Any) -> None:
    form = MicroBatch(1, 64, 64, packed=True, masked=False, row_lengths=(64,))
    saved: dict[bool, list[float]] = {False: [], True: []}
    for layers in (3, 6, 9):
        folder = make_base(tmp_path / str(layers), tokenizer, num_hidden_layers=layers)
        for recompute, found in saved.items():
            tracer = ActivationTracer(folder, of(folder), AdapterSection(), torch.float32, checkpointing=recompute)
            found.append(tracer.training(form).saved)
    kept, recomputed = saved[False], saved[True]
    assert kept[2] - kept[1] == kept[1] - kept[0] > recomputed[2] - recomputed[1]
    assert recomputed[2] - recomputed[1] == 3 * 64 * 32 * 4  # of three layers their inputs: 64 tokens of 32 float32


def test_recomputing_keeps_less_and_a_longer_row_needs_more(base: Path) -> None:
    def needs(width: int, recompute: bool) -> float:
        form = MicroBatch(1, width, width, packed=True, masked=False, row_lengths=(width,))
        return (
            ActivationTracer(base, of(base), AdapterSection(), torch.float32, checkpointing=recompute)
            .training(form)
            .saved
        )

    assert needs(64, True) < needs(64, False) < needs(128, False)


# --- what is held ---------------------------------------------------------------------------------------------------


def test_what_each_backend_holds_follows_its_formula(of_large: Callable[..., Recipe]) -> None:
    plan = make_plan(of_large(), H200)
    whole = memory(plan, "ddp")
    assert whole.base == 2 * 8_030_261_248  # the parameters of Llama-3-8B
    for backend in BACKENDS:
        found = memory(plan, backend)
        splits_base, splits_moments = backend in ("zero3", "fsdp2"), backend not in ("single", "ddp")
        splits_gradients = backend in ("zero2", "zero3", "fsdp2")
        assert found.base == pytest.approx(whole.base / (2 if splits_base else 1), rel=1e-6)
        assert found.optimizer == pytest.approx(2 * whole.adapter / (2 if splits_moments else 1), rel=1e-3)
        assert found.gradients == pytest.approx(whole.adapter / (2 if splits_gradients else 1), rel=1e-6)
        assert found.peak >= found.training >= found.base + found.adapter
        assert found.saving < found.training


def test_offloading_moves_bytes_to_the_host(of_large: Callable[..., Recipe]) -> None:
    kept = memory(make_plan(of_large("parallel.backend=zero3"), H200), "zero3")
    moved = memory(make_plan(of_large("parallel.backend=zero3", "parallel.offload=cpu"), H200), "zero3")
    assert moved.base == moved.optimizer == 0 < kept.base
    assert moved.host > kept.host
    on_disk = ("parallel.backend=zero3", "parallel.offload=nvme", "parallel.nvme_path=/scratch")
    rests_there = memory(make_plan(of_large(*on_disk), H200), "zero3")
    assert rests_there.disk > moved.disk + kept.base


def test_no_weight_is_read(tmp_path: Path, base: Path, recipe: Write) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in base.iterdir():
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        (folder / file.name).write_bytes(content[:header] if file.suffix == ".safetensors" else content)
    whole = make_plan(load_recipe(recipe()), H200)
    cut = make_plan(load_recipe(recipe(base={"model": str(folder)})), H200)
    assert memory(cut, "single") == memory(whole, "single")


@dataclass(frozen=True)
class Kind:
    """A kind of base and adapter."""

    model: str
    base: dict[str, Any]
    adapter: dict[str, Any]
    dtype: torch.dtype = torch.float32


KINDS = {
    "nf4": Kind("llama", {"quantize": "nf4"}, {}),
    "fp4_with_plain_scales": Kind("llama", {"quantize": "fp4", "double_quantize": False}, {}, torch.bfloat16),
    "int8": Kind("llama", {"quantize": "int8"}, {"init": "pissa"}),
    "some_are_skipped": Kind(
        "llama", {"quantize": "nf4", "skip_modules": ("down_proj",)}, {"modules_to_save": ("down_proj",), "targets": ("q_proj",)}
    ),
    "nf4_and_dora": Kind("llama", {"quantize": "nf4"}, {"method": "dora"}, torch.bfloat16),
    "nf4_and_experts": Kind("mixtral", {"quantize": "nf4"}, {"target_parameters": "all-experts"}),
    "dora": Kind("llama", {}, {"method": "dora"}),
    "dora_with_dropout": Kind("gpt2", {}, {"method": "rsdora", "dropout": 0.1}),
    "lora_fa": Kind("llama", {}, {"method": "lora_fa"}),
    "pissa": Kind("llama", {}, {"init": "pissa"}),
    "experts": Kind("mixtral", {}, {"target_parameters": "all-experts"}, torch.bfloat16),
    "experts_transposed": Kind("gpt_oss", {}, {"target_parameters": "all-experts"}),
    "tokens": Kind("llama_tied", {"quantize": "nf4"}, {"trainable_tokens": (5, 7)}),
    "tied": Kind("gpt2", {}, {"targets": ("wte", "c_attn"), "tied_head": "both"}),
    "biases": Kind("gpt2", {}, {"bias": "all"}),
    "whole_head": Kind("llama", {}, {"modules_to_save": ("lm_head",), "targets": ("q_proj",)}, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_what_is_held_and_kept_for_backward_is_what_a_real_model_holds_and_keeps(name: str, tmp_path: Path) -> None:
    kind, width = KINDS[name], 60
    build_variant(kind.model).save_pretrained(tmp_path)
    section, adapter = of(tmp_path, **kind.base), AdapterSection(rank=4, **kind.adapter)

    shapes = read_shapes(tmp_path, section, adapter, kind.dtype)
    form = MicroBatch(1, width, width, packed=True, masked=False, row_lengths=(width,))
    live = ActivationTracer(tmp_path, section, adapter, kind.dtype, checkpointing=False).training(form)

    model = load_for_training(section, tmp_path, kind.dtype, torch.device("cpu"), sharded=False).model
    spec = adapter_spec(adapter, tmp_path)
    attach(model, find_targets(model, spec), spec, seed=0)
    fuse_model(model)
    learnt = adapter_tensors(model)
    known = {id(tensor) for tensor in learnt.values()}
    assert base_bytes(shapes) == sum(p.nbytes for p in model.parameters() if id(p) not in known)
    assert adapter_bytes(shapes) == sum(tensor.nbytes for tensor in learnt.values())
    assert shapes.fixed_bytes == sum(tensor.nbytes for tensor in fixed_tensors(model).values())
    ids = torch.arange(width)[None] % 60
    batch = Batch(ids, ids, torch.arange(width)[None], None, (0,), width, width, (width,))
    assert live.saved == pytest.approx(saved_for_backward(model.train(), batch), rel=0.10)


def test_a_packed_weight_is_in_floats_for_a_moment_and_counts_for_all_its_values(base: Path) -> None:
    form = MicroBatch(
        1, 4, 4, packed=True, masked=False, row_lengths=(4,)
    )  # few tokens, so that weights are what is large

    def looked_at(**settings: Any) -> tuple[ModelShapes, LiveBytes]:
        section = of(base, **settings)
        tracer = ActivationTracer(base, section, AdapterSection(), torch.float32, checkpointing=False)
        return read_shapes(base, section, AdapterSection(), torch.float32), tracer.training(form)

    (plain, kept), (packed, unpacked), (rows, in_two) = (
        looked_at(),
        looked_at(quantize="nf4"),
        looked_at(quantize="int8"),
    )
    weight = 48 * 32 * 4  # the largest, in float32
    assert unpacked.saved == in_two.saved == kept.saved
    assert kept.layer < weight < unpacked.layer <= kept.layer + 1.1 * weight
    assert 1.8 * weight < in_two.layer <= kept.layer + 2.1 * weight  # bytes become floats in two products
    assert base_bytes(packed) < base_bytes(rows) < base_bytes(plain)
    assert packed.num_matmul_parameters() == rows.num_matmul_parameters() == plain.num_matmul_parameters()
    assert sum(piece.num_values for piece in packed.base) == sum(piece.numel for piece in plain.base)
    assert packed.quantizing_bytes > weight
    assert plain.quantizing_bytes == 0


def test_a_gpus_chunks_of_logits_are_planned_as_it_computes_them(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **(SMALL | {"vocab_size": 128_256}))
    config.save_pretrained(tmp_path)
    tokens = 2048
    form = MicroBatch(1, tokens, tokens, packed=True, masked=False, row_lengths=(tokens,))
    cpu, gpu = (
        ActivationTracer(
            tmp_path, of(tmp_path), AdapterSection(), torch.bfloat16, checkpointing=False, device_type=device_type
        ).training(form)
        for device_type in ("cpu", "cuda")
    )
    chunks = CHUNK_BYTES["cuda"] - CHUNK_BYTES["cpu"]
    assert chunks < gpu.head - cpu.head < 2 * chunks  # float32 logits, and their copy in bfloat16
    assert gpu.layer == cpu.layer


def test_no_summed_weights_of_experts_are_counted(tmp_path: Path) -> None:
    model = build_variant("mixtral")
    model.save_pretrained(tmp_path)
    form = MicroBatch(1, 4, 4, packed=True, masked=False, row_lengths=(4,))
    plain, experts = (
        ActivationTracer(
            tmp_path, of(tmp_path), AdapterSection(targets=("q_proj",), target_parameters=which, rank=1), torch.float32,
            checkpointing=False,
        ).training(form)
        for which in ((), "all-experts")
    )  # fmt: skip
    sizes = [p.nbytes for name, p in model.named_parameters() if p.dim() == 3]
    assert 0 < experts.saved - plain.saved < sum(sizes) / 4  # factors and their products, for backward
    assert experts.layer - plain.layer < min(sizes) / 2


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # bitsandbytes' own, on CPUs
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_base_whose_files_are_packed_is_planned_as_it_is_loaded(quantize: str, base: Path, tmp_path: Path) -> None:
    skipped = ["lm_head", "model.layers.1.mlp"]
    how = BitsAndBytesConfig(
        load_in_8bit=quantize == "int8", load_in_4bit=quantize != "int8", bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, llm_int8_skip_modules=skipped,
    )  # fmt: skip
    AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, dtype=torch.float32, device_map="cpu"
    ).save_pretrained(tmp_path)

    shapes = read_shapes(tmp_path, of(tmp_path), AdapterSection(), torch.float32)

    model = load_for_training(of(tmp_path), tmp_path, torch.float32, torch.device("cpu"), sharded=False).model
    assert base_bytes(shapes) == sum(p.nbytes for p in model.parameters())
    assert shapes.quantization == quantize
    assert shapes.quantizing_bytes == 0  # they are never in floats while they are read
    (tmp_path / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(BaseModelError, match="quantised with 'gptq'; lorakit reads bitsandbytes"):
        read_shapes(tmp_path, of(tmp_path), AdapterSection(), torch.float32)


def test_quantising_leaves_a_process_a_quarter_of_the_base(of_large: Callable[..., Recipe]) -> None:
    plans = [make_plan(of_large(*more), H200) for more in ((), ("base.quantize=nf4",))]
    for backend in ("single", "ddp", "zero3", "fsdp2"):
        full, quantised = (memory(plan, backend) for plan in plans)
        in_floats = 2 * 2 * 128256 * 4096 // (1 if backend in ("single", "ddp") else 2)  # embedding and head
        assert quantised.base - in_floats == pytest.approx((full.base - in_floats) * (4.127 / 16), rel=0.01)
        assert quantised.loading < quantised.training < full.training
        assert quantised.activations - full.activations == pytest.approx(2 * 14336 * 4096, rel=1.0)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_the_state_of_an_optimizer_is_counted_to_the_byte(name: str, base: Path) -> None:
    section = AdapterSection(rank=100, rank_pattern={"q_proj": 3})  # tensors above and below 4,096 elements
    shapes = read_shapes(base, of(base), section, torch.float32)
    sizes = [piece.numel for piece in shapes.adapter]
    tensors = {str(i): torch.nn.Parameter(torch.ones(size)) for i, size in enumerate(sizes)}
    optimizer = build_optimizer(tensors, name=name, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    for tensor in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    real = local_bytes(value for state in optimizer.state.values() for value in state.values())
    assert min(sizes) < 4096 < max(sizes)
    assert optimizer_state_bytes(name, shapes, unsharded, 1, len(sizes)) == OptimizerStateBytes(real)
    paged = optimizer_state_bytes(f"paged_{name}", replace(shapes, tensors=tuple(_larger(shapes))), unsharded, 1, 0)
    assert paged.paged > 0
    assert paged.resident > 0  # tensors of fewer than 100,000 elements are not paged


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon", "sgd"])
def test_the_state_of_other_optimizers_is_counted_to_the_byte_too(name: str, base: Path) -> None:
    shapes = read_shapes(base, of(base), AdapterSection(rank=5), torch.float32)
    tensors = {tensor.name: torch.nn.Parameter(torch.ones(tensor.shape)) for tensor in shapes.adapter}
    optimizer = build_optimizer(tensors, name=name, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    for tensor in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    real = local_bytes(value for state in optimizer.state.values() for value in state.values())

    assert real > 0
    assert optimizer_state_bytes(name, shapes, unsharded, 1, len(tensors)) == OptimizerStateBytes(real)


def _larger(shapes: ModelShapes) -> Iterator[TensorShape]:
    for piece in shapes.adapter:
        yield replace(piece, shape=(piece.shape[0] * 30, *piece.shape[1:]))


def test_moments_in_8_bits_take_less_and_paged_ones_rest_with_the_host(of_large: Callable[..., Recipe]) -> None:
    names = ("adamw", "adamw8bit", "paged_adamw")
    plain, eight, paged = (
        memory(make_plan(of_large(f"train.optimizer={name}", "adapter.rank=512"), H200), "ddp") for name in names
    )
    assert eight.optimizer == pytest.approx(plain.optimizer * (2 + 8 / 256) / 8, rel=1e-3)
    assert paged.optimizer == 0
    assert paged.host - plain.host == pytest.approx(plain.optimizer, rel=1e-3)
    assert eight.disk < plain.disk


def test_what_the_adapter_keeps_fixed_is_kept_in_checkpoints(of_large: Callable[..., Recipe]) -> None:
    plain, twice = (memory(make_plan(of_large(f"adapter.init={init}"), H200), "ddp") for init in ("gaussian", "pissa"))
    assert twice.adapter == plain.adapter
    assert twice.base == plain.base + plain.adapter  # A0 and B0
    assert twice.disk == plain.disk + 5 * plain.adapter  # two checkpoints, two on their way, the patch


def test_float32_lengths_of_rows_do_not_double_what_is_gathered(of_large: Callable[..., Recipe]) -> None:
    plain, dora = (
        memory(make_plan(of_large(f"adapter.method={method}"), H200), "zero3") for method in ("lora", "dora")
    )
    assert dora.gathered == pytest.approx(plain.gathered, rel=0.01)


# --- advice ---------------------------------------------------------------------------------------------------------


def test_where_the_base_fits_the_whole_base_is_advised_and_where_not_it_is_split(
    of_large: Callable[..., Recipe],
) -> None:
    roomy = make_plan(of_large(), H200).advice
    tight = make_plan(of_large("train.activation_checkpointing=layers"), small(H200, 19)).advice
    assert roomy.best is not None
    assert roomy.best.backend == "ddp"
    assert "a full base" not in roomy.why
    assert tight.best is not None
    assert tight.best.backend == "fsdp2"
    assert "a full base of 16.06 GB does not fit each process" in tight.why
    for row in (*roomy.backends, *tight.backends):
        limit = (141 if row in roomy.backends else 19) * GB
        assert row.candidate.fits == (row.candidate.memory.peak * (1 + MARGIN) <= limit)


def test_one_process_that_is_faster_than_the_requested_ones_is_named(
    of_large: Callable[..., Recipe], recipe: Write
) -> None:
    parallel = {"backend": "ddp", "processes": 2}
    small_base = make_plan(load_recipe(recipe(parallel=parallel)), H200)
    assert small_base.advice.best is not None
    assert small_base.advice.best.num_processes == 2
    assert "one process would be faster" in small_base.advice.why
    assert "expected to be the fastest of 2 processes that fits" in small_base.text
    assert "one process" not in make_plan(of_large(), H200).advice.why


def test_the_cheapest_change_makes_it_fit(of_large: Callable[..., Recipe]) -> None:
    plan = make_plan(of_large(tokens=4096, rows=2), small(H200, 19))
    assert plan.advice.best is None
    assert plan.refusal is not None
    way = plan.advice.cheapest
    assert way is not None
    assert way.fits
    changes = (f"{key}={json.dumps(value)}" for key, value in way.changes.items())
    again = make_plan(of_large(*changes, tokens=4096, rows=2), small(H200, 19))
    assert memory(again, way.backend) == way.memory
    assert next(row.candidate for row in again.advice.backends if row.candidate.backend == way.backend).fits
    assert f"parallel.backend={way.backend}" in plan.refusal


def test_more_processes_are_proposed_where_nothing_else_helps(of_large: Callable[..., Recipe]) -> None:
    little = small(machine_with_gpu("H200", 2, 1, 12 * GB), 12)  # of host memory too, so that nothing can rest there
    plan = make_plan(of_large(tokens=1024), little)
    assert plan.advice.cheapest is not None
    assert plan.advice.cheapest.changes["parallel.processes"] == 4


def test_nothing_helps_a_machine_that_is_far_too_small(of_large: Callable[..., Recipe]) -> None:
    plan = make_plan(of_large(), small(H200, 1))
    assert plan.advice.best is None
    assert plan.advice.cheapest is None
    assert "take a smaller base" in str(plan.refusal)


def test_a_backend_whose_package_is_missing_is_not_called_too_large(
    of_large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(H200, described=False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # an import fails, as without the package

    plan = make_plan(of_large("parallel.backend=zero3"), here)
    tight = make_plan(of_large("parallel.backend=zero2"), small(here, 15))

    rows = {line.split()[0]: line for line in plan.text.splitlines() if " x 2 " in line}
    assert all(rows[name].endswith("  not installed") for name in ("zero1", "zero2", "zero3"))
    assert rows["fsdp2"].endswith("fits")
    assert "asks for zero3, which is not installed: pip install 'lorakit[deepspeed]'" in plan.text
    zero3 = next(row for row in plan.advice.backends if row.candidate.backend == "zero3")
    assert (zero3.candidate.fits, zero3.candidate.can_run, zero3.cheapest_change) == (True, False, None)
    assert "too large, not installed" in tight.text


def test_the_refusal_names_a_backend_that_would_fit_if_it_were_installed(
    of_large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = of_large("parallel.backend=zero3", "parallel.offload=nvme", "parallel.nvme_path=/scratch")
    enough = memory(make_plan(asked, H200), "zero3").peak * (1 + MARGIN) / GB
    here = replace(H200, described=False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # an import fails, as without the package

    plan = make_plan(asked, small(here, enough + 0.1))

    assert plan.advice.best is None
    assert str(plan.refusal).endswith("; not installed, but would fit: zero3 (pip install 'lorakit[deepspeed]')")


def test_recomputing_left_open_is_taken_only_where_memory_asks_for_it(of_large: Callable[..., Recipe]) -> None:
    recipe = of_large("train.activation_checkpointing=auto", rows=2)
    ways = {row.candidate.backend: row.candidate for row in make_plan(recipe, H200).advice.backends}
    assert not ways["ddp"].checkpointing
    ways = {row.candidate.backend: row.candidate for row in make_plan(recipe, small(H200, 30)).advice.backends}
    assert ways["ddp"].checkpointing
    assert ways["ddp"].fits


# --- machines -------------------------------------------------------------------------------------------------------


def test_a_gpu_is_found_under_the_names_people_and_drivers_give_it() -> None:
    for name, found in (
        ("h200", "H200"), ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("a100-80gb", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("L40S", "L40S"), ("L4", "L4"),
    ):  # fmt: skip
        gpu = named_gpu(name)
        assert getattr(gpu, "name", None) == found, name
    assert named_gpu("") is None
    assert named_gpu("abacus") is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_is_known_by_its_name_in_any_case_and_spacing(gpu: Gpu) -> None:
    for name in (gpu.name, gpu.name.lower().replace(" ", ""), f"NVIDIA {gpu.name.upper()}", *gpu.other_names):
        assert named_gpu(name) is gpu, name


def test_a_gpu_of_a_similar_name_is_not_taken_for_another() -> None:
    for name in ("RTX 4090 Laptop GPU", "RTX A1000", "RTX A4000", "T400", "RTX 3060 8GB", "A100-SXM4-80GB MIG 1g.10gb"):
        assert named_gpu(name) is None, name
    assert named_gpu("Tesla V100-SXM2-32GB") is not named_gpu("Tesla V100-SXM2-16GB")


def test_an_unknown_gpu_is_answered_with_the_nearest_and_the_way_around() -> None:
    with pytest.raises(LorakitError, match=r"'rtx 4075' is not known. Nearest: .*RTX 4070.*--gpu-memory-gb N"):
        machine_with_gpu("rtx 4075", 1, 1, None)


def test_a_gpu_given_by_its_memory_is_planned_with_an_assumed_speed_that_is_named(recipe: Write) -> None:
    of_base = load_recipe(recipe())
    known = make_plan(of_base, machine_with_gpu("RTX 4090", 2, 1, None))
    other = make_plan(of_base, machine_with_gpu(None, 2, 1, None, 24 * GB))
    mixed = make_plan(of_base, machine_with_gpu("RTX 4090", 2, 1, None, 12 * GB))

    assert "2 x GPU of 24 GB" in other.text
    assert "that of an RTX 4090, bfloat16 included, is assumed" in other.text
    assert memory(other, "fsdp2") == memory(known, "fsdp2")
    assert "is assumed" not in known.text + mixed.text
    assert "2 x RTX 4090 of 12 GB" in mixed.text


def test_a_dtype_left_open_is_float32_on_a_gpu_without_bfloat16(recipe: Write) -> None:
    left_open = load_recipe(recipe(), ("base.dtype=auto",))
    dtypes = {name: make_plan(left_open, machine_with_gpu(name, 2, 1, None)).dtype for name in ("T4", "L4")}
    assert dtypes == {"T4": "float32", "L4": "bfloat16"}


def test_the_memory_of_a_control_group_counts(tmp_path: Path) -> None:
    group = tmp_path / "jobs" / "mine"
    group.mkdir(parents=True)
    (tmp_path / "jobs/memory.max").write_text("1000\n")
    (tmp_path / "jobs/memory.current").write_text("700\n")
    (tmp_path / "jobs/memory.stat").write_text("anon 100\ninactive_file 200\n")
    (group / "memory.max").write_text("max\n")
    assert cgroup_rooms(tmp_path, {"": "/jobs/mine"}) == [500]
    assert cgroup_rooms(tmp_path, {}) == []


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_describes_a_machine_and_writes_every_figure(
    recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["plan", str(recipe()), "--gpu", "H200", "--gpus", "8", "--nodes", "2", "--json", str(tmp_path / "p.json")]
    assert main(told) == 0
    text = capsys.readouterr().out
    assert "2 x 8 x H200 of 141 GB" in text
    assert "fits, advised" in text
    assert "why" in text
    facts = json.loads((tmp_path / "p.json").read_text())
    assert [row["backend"] for row in facts["backends"]] == list(BACKENDS)
    assert facts["backends"][1]["processes"] == 16
    assert facts["advice"] in BACKENDS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H2000000"], "'H2000000' is not known. Nearest: H200"),
        (["--gpu", "abacus"], "'abacus' is not known."),
        (["--gpus", "8"], "--gpus: describes a machine; name its GPU with --gpu"),
    ],
)
def test_a_machine_nobody_knows_is_refused(
    recipe: Write, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", str(recipe()), *arguments])
    assert code == 2
    assert words in capsys.readouterr().err


def test_what_does_not_fit_ends_with_2_and_says_what_would(
    large: Path, recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"train": "/elsewhere/rows.jsonl", "eval": None, "max_tokens": 4096}
    train = {"steps": 10, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 2}
    path = recipe(base={"model": str(large), "dtype": "bfloat16"}, data=data, train=train)
    assert main(["plan", str(path), "--gpu", "RTX 4090"]) == 2
    assert "nothing fits as the recipe stands; the cheapest change: parallel.backend=" in capsys.readouterr().err


# --- auto -----------------------------------------------------------------------------------------------------------


def test_a_recipe_that_leaves_nothing_open_is_not_planned(recipe: Write) -> None:
    path = recipe(base={"model": "/nowhere"})
    assert resolve_auto(load_recipe(path), fresh=False).values == {}


def test_auto_is_refused_with_what_only_a_named_backend_can_do(recipe: Write) -> None:
    for words, overrides in (
        ("offload: goes with a backend that is named", ("parallel.offload=cpu",)),
        ("looks at this machine alone", ("parallel.processes=4", "parallel.nodes=2", "parallel.rendezvous=a:1")),
    ):
        with pytest.raises(LorakitError, match=words):
            load_recipe(recipe(), ("parallel.backend=auto", *overrides))


@pytest.mark.spread
def test_a_launcher_of_others_chooses_nothing(recipe: Write) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = run_python("-m", "lorakit.cli", "train", recipe(), "parallel.backend=auto", env=os.environ | variables)
    assert done.returncode == 2
    assert "parallel.backend: `auto` is chosen by the `lorakit train` that starts the processes" in done.stderr


@pytest.mark.spread
def test_auto_is_chosen_recorded_and_kept_by_a_run_that_goes_on(recipe: Write, tmp_path: Path) -> None:
    path = recipe(parallel={"backend": "auto", "processes": 2}, train={"activation_checkpointing": "auto", "steps": 4})
    done = run_python("-m", "lorakit.cli", "train", path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["engine"]["backend"] == record["recipe"]["parallel"]["backend"] == "ddp"
    assert record["recipe"]["train"]["activation_checkpointing"] == "none"
    assert record["auto"].startswith("ddp: the full base of")
    assert "nothing is recomputed" in record["auto"]
    assert f"auto       {record['auto']}" in done.stdout

    record["recipe"]["parallel"]["backend"] = "fsdp2"  # as if it had been advised then
    (tmp_path / "out/run.json").write_text(json.dumps(record))
    choice = resolve_auto(load_recipe(path), fresh=False)
    assert choice.values == {"parallel.backend": "fsdp2", "train.activation_checkpointing": "none"}
    assert "as this run was begun" in choice.why
    assert resolve_auto(load_recipe(path), fresh=True).values["parallel.backend"] == "ddp"


@pytest.mark.parametrize("processes", [1, 2])
def test_moments_in_8_bits_leave_auto_the_backends_that_hold_whole_tensors(recipe: Write, processes: int) -> None:
    asked = ("train.optimizer=adamw8bit", f"parallel.processes={processes}")
    named = load_recipe(recipe(), (*asked, "parallel.backend=ddp"))

    choice = resolve_auto(load_recipe(recipe(), (*asked, "parallel.backend=auto")), fresh=True)

    assert choice.values == {"parallel.backend": "single" if processes == 1 else "ddp"}
    plan = make_plan(named)
    assert [row.candidate.backend for row in plan.advice.backends] == ["single", "ddp"]
    assert "left out    zero1, zero2, zero3, fsdp2: refused with optimizer adamw8bit" in plan.text


def test_no_more_processes_are_proposed_for_whole_tensors(of_large: Callable[..., Recipe]) -> None:
    plan = make_plan(of_large("train.optimizer=adamw8bit"), small(H200, 12))
    assert {row.candidate.backend for row in plan.advice.backends} == {"single", "ddp"}
    assert plan.advice.cheapest is None


def test_moments_that_are_paged_need_a_gpu(recipe: Write) -> None:
    rows = make_plan(load_recipe(recipe(), ("train.optimizer=paged_adamw8bit",))).advice.backends
    assert all("pages" in row.candidate.shortfall and row.cheapest_change is None for row in rows)


def test_auto_ends_where_nothing_fits(recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakit.planning.machine.free_host_memory", lambda: 100_000_000)
    with pytest.raises(RunError, match=r"parallel.backend: auto: nothing fits as the recipe stands"):
        resolve_auto(load_recipe(recipe(), ("parallel.backend=auto",)), fresh=False)


# --- beside reality (`make attack` has three more, benchmarks/plan.py the whole matrix) -------------------------------


@pytest.mark.spread
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "processes", "quantize", "settings"),
    [
        pytest.param("single", 1, "none", {}, marks=pytest.mark.attack),
        pytest.param("fsdp2", 2, "none", {}, marks=pytest.mark.attack),
        pytest.param(
            "single", 1, "nf4", {"adapter": {"method": "dora"}, "train": {"optimizer": "adamw8bit"}},
            marks=pytest.mark.attack,
        ),
        ("fsdp2", 2, "nf4", {}),
    ],
)  # fmt: skip
def test_a_run_takes_what_the_plan_says(
    backend: str, processes: int, quantize: str, settings: dict[str, Any], recipe: Write, tmp_path: Path, tokenizer: Any
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 512}  # fmt: skip
    folder = make_base(tmp_path / "base", tokenizer, **sizes)
    rows = write_rows(tmp_path / "long.jsonl", [{"text": "so many green birds " * 100}] * (2 * processes))
    path = recipe(
        base={"model": str(folder), "quantize": quantize}, adapter=settings.get("adapter", {}), parallel={"backend": backend, "processes": processes},
        data={"train": str(rows), "eval": None, "max_tokens": 256, "on_long_rows": "truncate", "loss_on": "all"},
        train={"steps": 2, "batch_size": processes, "micro_batch_size": 1, "warmup_steps": 1}
        | settings.get("train", {}),
    )  # fmt: skip
    planned = memory(make_plan(load_recipe(path)), backend)

    command = [sys.executable, "-m", "lorakit.cli", "train", str(path)]  # a process whose memory is all its own
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/run.json").read_text())
    ranks = [record["engine"], *record["ranks"]]
    assert planned.base == max(rank["base_bytes"] for rank in ranks)
    assert planned.adapter == max(rank["adapter_bytes"] for rank in ranks)
    assert planned.optimizer == max(rank["optimizer_bytes"] for rank in ranks)
    taken = max(rank["peak_memory_bytes"] for rank in ranks)
    assert taken == pytest.approx(planned.peak, rel=MARGIN)


def test_the_built_in_base_can_be_planned(recipe: Write) -> None:
    plan = make_plan(load_recipe(recipe(base={"model": "builtin:tiny"})), H200)
    assert memory(plan, "single").base > 0
    assert find_base("builtin:tiny").exists()
