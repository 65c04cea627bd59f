"""A base read by ranges equals the full base: values, names, buffers and errors, in the memory of the ranges alone."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from lorakit.base.lazy import Interleaved, LazyTensors, Recomputed, StoredTensor, WeightSource, source_of, traced
from lorakit.base.meta import load_on_meta
from lorakit.base.transformers_io import load_base, load_skeleton
from lorakit.errors import BaseModelError
from lorakit.files.base_files import open_base_files
from lorakit.files.safetensors import file_parts
from lorakit.lora import inject
from lorakit.lora.inject import adapter_tensors
from tests.helpers.models import CAUSAL, EXPERTS, scrambled

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            model = scrambled(name)
            model.generation_config.max_new_tokens = 7  # a setting that no config.json holds
            model.save_pretrained(folders[name])
        return folders[name]

    return folder


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def ranges(size: int) -> list[tuple[int, int]]:
    """Everything, nothing, the ends, halves as two processes hold them, and some at random."""
    draw = random.Random(size)
    some = [sorted((draw.randint(0, size), draw.randint(0, size))) for _ in range(6)]
    return [(0, size), (0, 0), (size, size), (size - 1, size), (0, size // 2), (size // 2, size), *map(tuple, some)]


def read_range(
    tensors: LazyTensors, name: str, start: int, stop: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return elements of a flattened parameter."""
    tensor = torch.empty(stop - start, dtype=dtype)
    tensors.fill(name, start, tensor)
    return tensor


def assert_same_base(folder: Path, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Assert the law: a base on meta, with its files, has the values, names and buffers of the full base."""
    full, on_meta = load_base(folder, dtype, CPU), load_on_meta(folder, dtype)
    tensors, expected, actual = LazyTensors(folder, on_meta), parameters(full), parameters(on_meta)
    assert expected.keys() == actual.keys()
    assert len(list(full.parameters())) == len(list(on_meta.parameters())), "the same weights are tied"
    for name, parameter in expected.items():
        assert actual[name].is_meta
        assert (actual[name].dtype, actual[name].shape) == (parameter.dtype, parameter.shape), name
        for start, stop in ranges(parameter.numel()):
            part = read_range(tensors, name, start, stop, parameter.dtype)
            assert torch.equal(part, parameter.detach().flatten()[start:stop]), f"{name} {start}:{stop}"
    buffers, others = dict(full.named_buffers()), dict(on_meta.named_buffers())
    assert buffers.keys() == others.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == others[name].dtype
        assert torch.equal(buffer, others[name]), name
    return full, on_meta


def filled(folder: Path, on_meta: Any) -> Any:
    """Return a model on meta with every parameter read."""
    tensors = LazyTensors(folder, on_meta)
    values = {
        parameter: nn.Parameter(read_range(tensors, name, 0, parameter.numel(), parameter.dtype).view(parameter.shape))
        for name, parameter in on_meta.named_parameters()
    }
    for name, parameter in parameters(on_meta).items():
        module, _, key = name.rpartition(".")
        setattr(on_meta.get_submodule(module), key, values[parameter])
    return on_meta


IDS = torch.arange(3, 27).reshape(2, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_every_range_is_that_of_the_full_base(name: str, dtype: torch.dtype, bases: Callable[[str], Path]) -> None:
    full, on_meta = assert_same_base(bases(name), dtype)

    assert not on_meta.training
    assert str(on_meta.config) == str(full.config)
    assert on_meta.config.name_or_path == full.config.name_or_path
    assert on_meta.generation_config.max_new_tokens == 7  # type: ignore[union-attr]
    assert on_meta.generation_config.to_dict() == full.generation_config.to_dict()  # type: ignore[operator, union-attr]
    assert {key for key in vars(full) if str(vars(full)[key]) != str(vars(on_meta)[key])} == set()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_filled_base_computes_what_the_full_base_does(name: str, bases: Callable[[str], Path]) -> None:
    folder = bases(name)
    full, on_meta = load_base(folder, torch.float32, CPU), load_on_meta(folder, torch.float32)

    with torch.no_grad():
        assert torch.equal(filled(folder, on_meta)(IDS).logits, full(IDS).logits)


def test_the_cases_hold_what_they_are_there_for(bases: Callable[[str], Path]) -> None:
    """Merged experts, recomputed tensors, mixed dtypes, tied weights, stored buffers: a law over none of them is empty."""
    kinds = {name: kinds_of(load_on_meta(bases(name), torch.bfloat16)) for name in CAUSAL}
    assert kinds["mixtral"] == kinds["qwen3_moe"] == {StoredTensor, Interleaved}
    assert kinds.get("inkling2_text", {StoredTensor, Recomputed}) == {StoredTensor, Recomputed}
    for name, dtype in (("ernie4_5_moe", torch.bfloat16), ("gpt_oss", torch.float16)):
        dtypes = {parameter.dtype for parameter in load_on_meta(bases(name), dtype).parameters()}
        assert dtypes == {dtype, torch.float32}
    tied: Any = load_on_meta(bases("gpt2"), torch.float32)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    buffers = dict(load_on_meta(bases("deepseek_v3"), torch.bfloat16).named_buffers())
    assert buffers["model.layers.1.mlp.gate.e_score_correction_bias"].any()


def kinds_of(model: nn.Module) -> set[type[WeightSource]]:
    return {type(source) for parameter in model.parameters() if (source := source_of(parameter)) is not None}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_any_stored_dtype_and_many_files(tmp_path: Path, stored: torch.dtype, tied: bool) -> None:
    model = scrambled("llama", tie_word_embeddings=tied).to(stored)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(open_base_files(tmp_path).shards) > 2

    for dtype in (torch.float32, torch.bfloat16):
        _, on_meta = assert_same_base(tmp_path, dtype)
        same = on_meta.get_parameter("lm_head.weight") is on_meta.get_parameter("model.embed_tokens.weight")
        assert same == tied


@pytest.mark.parametrize("piece_bytes", [64, 100])
def test_pieces_join_without_seams(
    monkeypatch: pytest.MonkeyPatch, bases: Callable[[str], Path], piece_bytes: int
) -> None:
    monkeypatch.setattr("lorakit.base.lazy.PIECE_BYTES", piece_bytes)
    for name in ("llama", "mixtral"):
        assert_same_base(bases(name), torch.bfloat16)


def test_names_and_values_stay_when_adapters_are_attached(bases: Callable[[str], Path]) -> None:
    folder = bases("llama")
    full, on_meta = load_base(folder, torch.float32, CPU), load_on_meta(folder, torch.float32)
    adapted = inject(on_meta, rank=2)

    tensors = LazyTensors(folder, adapted)

    for name, parameter in full.named_parameters():
        assert torch.equal(read_range(tensors, name, 3, 30), parameter.detach().flatten()[3:30])
    for name in adapter_tensors(adapted):
        with pytest.raises(BaseModelError, match=f"'{name}' is no parameter that was loaded from here"):
            read_range(tensors, name, 0, 1)


def test_reading_into_a_tensor_fills_that_tensor_and_no_more(bases: Callable[[str], Path]) -> None:
    folder = bases("mixtral")
    full, on_meta = load_base(folder, torch.bfloat16, CPU), load_on_meta(folder, torch.bfloat16)
    tensors = LazyTensors(folder, on_meta)
    for name, parameter in full.named_parameters():
        flat = parameter.detach().flatten()
        room = torch.full((4, 5), 7.0, dtype=torch.bfloat16)
        tensors.fill(name, 2, room[1:3])
        assert torch.equal(room[1:3].flatten(), flat[2:12]), name
        assert (room[0] == 7).all()
        assert (room[3] == 7).all()
        wide = nn.Parameter(torch.zeros(10))  # by way of the dtype of the base
        tensors.fill(name, 2, wide)
        assert torch.equal(wide.detach(), flat[2:12].float()), name


def test_files_are_closed_when_they_are_let_go(bases: Callable[[str], Path]) -> None:
    tensors = LazyTensors(bases("llama"), load_on_meta(bases("llama"), torch.float32))
    before = len(os.listdir("/dev/fd"))
    read_range(tensors, "model.norm.weight", 0, 32)
    read_range(tensors, "model.norm.weight", 0, 32)
    assert len(os.listdir("/dev/fd")) == before + 1
    del tensors
    assert len(os.listdir("/dev/fd")) == before


def test_a_range_outside_of_a_parameter_is_refused(bases: Callable[[str], Path]) -> None:
    tensors = LazyTensors(bases("llama"), load_on_meta(bases("llama"), torch.float32))
    for start, stop in ((-1, 4), (30, 33), (33, 33)):
        with pytest.raises(AssertionError, match="model.norm.weight"):
            read_range(tensors, "model.norm.weight", start, stop)


# names that transformers changes while it loads


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The base with other stored tensors, in one file."""
    files = open_base_files(folder)
    tensors = change({name: files.shard_of[name].read(name) for name in files.shard_of})
    for shard in files.shards:
        shard.path.unlink()
    with open(folder / "model.safetensors", "wb") as file:
        file.writelines(file_parts(tensors, {"format": "pt"}))
    return folder


@pytest.fixture
def copy(tmp_path: Path, bases: Callable[[str], Path]) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(bases(name), tmp_path / name))


def test_names_without_the_prefix_of_the_full_model(copy: Callable[[str], Path]) -> None:
    folder = rewritten(
        copy("gpt2"), lambda stored: {name.removeprefix("transformer."): stored[name] for name in stored}
    )
    assert_same_base(folder, torch.bfloat16)


def test_names_of_old_files(copy: Callable[[str], Path]) -> None:
    def old(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in stored.items()
        }

    folder = rewritten(copy("bert"), old)
    assert any(name.endswith("LayerNorm.gamma") for name in open_base_files(folder).shard_of)
    assert_same_base(folder, torch.float32)


@pytest.mark.parametrize("saved", ["embedding", "head", "both", "both but different"])
def test_tied_weights_are_tied_as_in_the_full_base(tmp_path: Path, saved: str) -> None:
    scrambled("llama", tie_word_embeddings=True).save_pretrained(tmp_path)

    def change(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = stored["model.embed_tokens.weight"] + (saved == "both but different")
        if saved == "head":
            del stored["model.embed_tokens.weight"]
        return stored if saved == "embedding" else {**stored, "lm_head.weight": head}

    _, on_meta = assert_same_base(rewritten(tmp_path, change), torch.bfloat16)

    same = on_meta.get_parameter("lm_head.weight") is on_meta.get_parameter("model.embed_tokens.weight")
    assert same == (saved != "both but different")
    tied: Any = on_meta.all_tied_weights_keys
    assert tied == ({"lm_head.weight": "model.embed_tokens.weight"} if same else {})


def test_an_engine_that_partitions_inside_transformers_is_switched_off(bases: Callable[[str], Path]) -> None:
    """Given accelerate's DeepSpeed plugin alive, under which transformers would partition what it builds."""
    from transformers.integrations import HfDeepSpeedConfig, deepspeed

    class Alive(HfDeepSpeedConfig):
        def __init__(self) -> None:  # without DeepSpeed itself, which need not be installed
            deepspeed.set_hf_deepspeed_config(self)

        def is_zero3(self) -> bool:
            return True

    alive = Alive()
    try:
        assert deepspeed.is_deepspeed_zero3_enabled()
        on_meta = load_on_meta(bases("llama"), torch.float32)
        assert all(parameter.is_meta for parameter in on_meta.parameters())
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert alive is not None


# sources


def operations() -> dict[str, Callable[[list[torch.Tensor]], torch.Tensor]]:
    """What loaders do to tensors (4, 6): every rule along every dimension, nested, and what no rule covers."""
    cases: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {}
    for dim in (0, 1, -1, -2):
        cases[f"cat {dim}"] = lambda x, dim=dim: torch.cat(x, dim=dim)  # type: ignore[misc]
        cases[f"stack {dim}"] = lambda x, dim=dim: torch.stack(x, dim)  # type: ignore[misc]
        cases[f"chunk {dim}"] = lambda x, dim=dim: torch.chunk(x[0], 2, dim)[1].contiguous()  # type: ignore[misc]
        cases[f"split {dim}"] = lambda x, dim=dim: torch.split(x[1], [1, 3, 2][: 2 + dim % 2], dim=dim)[1]  # type: ignore[misc]
        cases[f"experts {dim}"] = lambda x, dim=dim: torch.cat([torch.stack(x), torch.stack(x[::-1])], dim=dim)  # type: ignore[misc]
        cases[f"uneven {dim}"] = lambda x, dim=dim: torch.split(torch.cat([*x, *x], dim=dim), 5, dim=dim)[-1]  # type: ignore[misc]
    cases["transposed"] = lambda x: torch.cat([x[0].T, x[1].transpose(0, 1).contiguous()])
    cases["arithmetic"] = lambda x: torch.stack([(1 + x[0]) / 2, -x[2]])
    cases["with constants"] = lambda x: torch.cat([x[0], x[1].new_zeros(4, 1), x[2].new_zeros(0)], dim=1)
    cases["indexed"] = lambda x: torch.stack(x)[1:, ::2]
    return cases


@pytest.mark.parametrize("max_blocks", [0, 1 << 16], ids=["recomputed", "interleaved"])
@pytest.mark.parametrize("case", operations())
def test_a_source_gives_what_the_operation_gives(case: str, max_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakit.base.lazy.MAX_BLOCKS", max_blocks)
    numbers = torch.Generator().manual_seed(0)
    real = [torch.randn(4, 6, generator=numbers) for _ in range(3)]
    expected = operations()[case](real).flatten()

    source = source_of(operations()[case]([traced(StoredTensor((4, 6), torch.float32, str(i))) for i in range(3)]))

    def read(stored: StoredTensor, out: torch.Tensor, start: int) -> None:
        out.copy_(real[int(stored.name)].flatten()[start : start + len(out)])

    assert source is not None
    if case[-1].isdigit():
        assert isinstance(source, Interleaved if max_blocks else Recomputed)
    for start, stop in ranges(len(expected)):
        out = torch.empty(stop - start)
        source.fill(out, start, read)
        assert torch.equal(out, expected[start:stop])


def test_rules_read_no_more_than_a_range_needs() -> None:
    experts = [traced(StoredTensor((8, 16), torch.float32, f"{kind}{i}")) for kind in ("gate", "up") for i in range(4)]
    source = source_of(torch.cat([torch.stack(experts[:4]), torch.stack(experts[4:])], dim=1))
    reads: list[tuple[str, int, int]] = []
    assert source is not None

    source.fill(torch.empty(150), 256 + 120, lambda stored, out, start: reads.append((stored.name, start, len(out))))

    assert reads == [("gate1", 120, 8), ("up1", 0, 128), ("gate2", 0, 14)]


def test_what_was_written_in_place_has_no_source() -> None:
    tensor = traced(StoredTensor((4, 6), torch.float32, "0"))
    copied = tensor.clone()
    assert source_of(copied) is not None
    copied[0] = 1
    assert source_of(copied) is None
    assert source_of(torch.stack([tensor, copied])) is None
    empty = torch.empty(4, 6, device="meta")
    assert source_of(torch.cat([tensor, empty])) is None


# errors


def test_a_cut_file_is_an_error(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(BaseModelError, match=r"llama/model\.safetensors: .* the file is cut or padded"):
        load_on_meta(folder, torch.float32)


def test_a_file_that_ends_while_it_is_read_is_an_error_that_names_the_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    tensors = LazyTensors(folder, load_on_meta(folder, torch.float32))
    file = folder / "model.safetensors"
    name = max((entry.start, name) for name, entry in open_base_files(folder).shards[0].entries.items())[1]
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 4)

    assert read_range(tensors, name, 0, 3).numel() == 3
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(BaseModelError, match=rf"llama/model\.safetensors: the file ended while {name} was read"):
            tensors.fill(name, 0, torch.empty(32, dtype=dtype))


def test_files_that_were_replaced_are_an_error(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    on_meta = load_on_meta(folder, torch.float32)
    rewritten(folder, lambda stored: {**stored, "model.norm.weight": torch.ones(33)})
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight is not what it was when the model was built"):
        LazyTensors(folder, on_meta).read_weight("model.norm.weight")
    rewritten(folder, lambda stored: {name: stored[name] for name in stored if name != "model.norm.weight"})
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight is not what it was"):
        LazyTensors(folder, on_meta).read_weight("model.norm.weight")


def both_refuse(folder: Path, message: str) -> None:
    with pytest.raises(BaseModelError):
        load_base(folder, torch.float32, CPU)
    with pytest.raises(BaseModelError, match=message):
        load_on_meta(folder, torch.float32)


def test_a_missing_tensor_is_an_error_that_names_it(copy: Callable[[str], Path]) -> None:
    lost = "model.layers.1.mlp.up_proj.weight"
    folder = rewritten(copy("llama"), lambda stored: {name: stored[name] for name in stored if name != lost})
    both_refuse(folder, rf"llama/model\.safetensors: 1 tensors of LlamaForCausalLM are missing .*: {lost} is missing")


def test_a_base_without_any_known_name_is_an_error_and_takes_no_memory(copy: Callable[[str], Path]) -> None:
    """Missing parameters are not made and drawn at random first: these are too large for any address space."""
    folder = rewritten(copy("llama"), lambda stored: {f"other.{name}": stored[name] for name in stored})
    config = json.loads((folder / "config.json").read_text())
    size = {"hidden_size": 1 << 22, "intermediate_size": 1 << 24, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, **size}))
    with pytest.raises(BaseModelError, match=r"12 tensors of LlamaForCausalLM are missing"):
        load_on_meta(folder, torch.float32)


def test_a_tensor_of_another_shape_is_an_error_that_names_it(copy: Callable[[str], Path]) -> None:
    folder = rewritten(copy("llama"), lambda stored: {**stored, "model.norm.weight": torch.ones(33)})
    both_refuse(folder, r"model\.norm\.weight in model\.safetensors is \(33,\) instead of \(32,\)")


def test_a_missing_expert_is_an_error_that_names_the_merged_tensor(copy: Callable[[str], Path]) -> None:
    def without(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: stored[name] for name in stored if ".experts.2." not in name or ".layers.0." not in name}

    both_refuse(
        rewritten(copy("mixtral"), without),
        r"layers\.0\.mlp\.experts\.down_proj is \(3, 32, 48\) instead of \(4, 32, 48\)",
    )


def test_an_unknown_architecture_is_the_error_of_the_full_base(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "config.json").write_text('{"model_type": "nothing"}')
    both_refuse(folder, r"llama: transformers cannot load it: ValueError: .*nothing")


def test_what_is_not_only_rearranged_is_refused_with_a_way_out(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(BaseModelError, match=r"quantization_config.*use backend single, ddp or zero2"):
        load_on_meta(folder, torch.float32)


def test_a_tensor_that_transformers_writes_into_is_refused(tmp_path: Path) -> None:
    """zaya sets the last element of a stored buffer after it was loaded."""
    config = AutoConfig.for_model("zaya", **EXPERTS | {"num_experts_per_tok": 1})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match=r"mlp\.gate\.balancing_biases is not .*use backend single, ddp or zero2"):
        load_on_meta(tmp_path, torch.float32)


def test_a_parameter_that_transformers_would_draw_at_random_unasked_is_refused(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some architectures name tensors that may be missing; a full base then has random ones."""
    lost = "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [lost])
    folder = rewritten(copy("llama"), lambda stored: {name: stored[name] for name in stored if name != lost})
    assert load_base(folder, torch.float32, CPU) is not None
    with pytest.raises(BaseModelError, match=rf"{lost} is not put together from stored tensors .*use backend single"):
        load_on_meta(folder, torch.float32)


# memory

MEASURE = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from lorakit.base.transformers_io import load_base
from lorakit.base.lazy import LazyTensors
from lorakit.base.meta import load_on_meta

def half(folder, dtype):
    model = load_on_meta(folder, dtype)
    tensors = LazyTensors(folder, model)
    halves = {name: torch.empty(p.numel() // 2, dtype=p.dtype) for name, p in model.named_parameters()}
    for name, values in halves.items():
        tensors.fill(name, 0, values)
    return halves

def full(folder, dtype):
    return load_base(folder, dtype, torch.device("cpu"))

def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

load, dtype = globals()[sys.argv[1]], getattr(torch, sys.argv[2])
warm, folder = map(Path, sys.argv[3:])
load(warm, torch.float32)
before, tensors = resident("VmHWM"), load(folder, dtype)
print(resident("VmHWM") - before)
"""


@pytest.mark.spread
@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_half_a_base_takes_the_memory_of_half_a_base(tmp_path: Path, bases: Callable[[str], Path]) -> None:
    """Experts stored one by one and merged while they are loaded: 370 MB in float32. Mapped files would count."""
    folder = tmp_path / "large"
    folder.mkdir()
    large = {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 16384, "num_local_experts": 8,
    }  # fmt: skip
    config = AutoConfig.for_model("mixtral", **CAUSAL["mixtral"] | large)
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    sizes = [parameter.numel() for parameter in load_skeleton(folder).parameters()]
    for name, parameter in load_skeleton(folder).named_parameters():
        if ".mlp.experts." in name:
            layer = name.rpartition(".mlp.experts.")[0]
            for expert in range(8):
                stored = f"{layer}.block_sparse_moe.experts.{expert}"
                kinds = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
                shape = (parameter.shape[1] // len(kinds), parameter.shape[2])
                tensors |= {f"{stored}.{kind}.weight": torch.ones(shape) for kind in kinds}
        else:
            tensors[name.replace(".mlp.gate", ".block_sparse_moe.gate")] = torch.ones(parameter.shape)
    with open(folder / "model.safetensors", "wb") as file:
        file.writelines(file_parts(tensors, {"format": "pt"}))

    def peak(load: str, dtype: torch.dtype) -> int:
        settings = load, str(dtype).removeprefix("torch."), str(bases("mixtral")), str(folder)
        done = subprocess.run([sys.executable, "-c", MEASURE, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    slack = 40 << 20
    for dtype in (torch.bfloat16, torch.float32):
        part, full = peak("half", dtype), peak("full", dtype)
        print(f"{dtype}: half {part:,} bytes, full {full:,}")
        bound = dtype.itemsize * (sum(sizes) // 2 + max(sizes)) + slack
        assert part < bound, f"{dtype}: {part:,} bytes, {bound:,} allowed"
        assert full > bound, f"{dtype}: a full base takes {full:,} bytes, so the bound of {bound:,} proves nothing"
