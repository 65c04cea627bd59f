"""A base of which two layers are in memory at a time trains as one that is whole; what goes wrong is an error."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakit import train
from lorakit.base.layers import checkpoint_layers
from lorakit.base.loading import load_for_training
from lorakit.data.batch import Batch
from lorakit.errors import BaseModelError, RecipeError
from lorakit.lora import AdapterSpec, adapter_tensors, attach
from lorakit.objectives.cross_entropy import LossModel
from lorakit.ops.fuse import fuse_model
from lorakit.parallel import StepSettings, open_engine
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.streaming import LayerStream, StreamingEngine, file_source, host_source, streamed_layers
from lorakit.patch import read_patch
from lorakit.planning import make_plan as plan
from lorakit.recipe import BaseSection, ParallelSection, TrainSection, load_recipe
from tests.helpers.bases import make_base
from tests.helpers.models import scrambled

CPU = torch.device("cpu")
LAYERS = 5
STREAM = ParallelSection(offload="stream")


def batches(step: int) -> list[Batch]:
    made = []
    for number in range(2):
        ids = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(2 * step + number))
        mask = torch.ones_like(ids)
        made.append(
            Batch(ids, ids.roll(-1, 1), mask, torch.arange(10).expand(2, 10), (0, 1), 20, (10, 10), torch.ones(2))
        )
    return made


def engine_on(
    folder: Path, parallel: ParallelSection, *, checkpointing: bool = False, quantize: Any = "none", **spec: Any
) -> Any:
    """An engine that has taken a base with an adapter whose B is not zero."""
    engine = open_engine(parallel)
    section = BaseSection(model=str(folder), quantize=quantize)
    loaded = load_for_training(section, folder, torch.float32, engine.device, sharded=engine.shards_base)
    adapter = AdapterSpec(rank=3, **spec)
    attach(loaded.model, adapter, 0, loaded.read_weight)
    fuse_model(loaded.model)
    for number, tensor in enumerate(adapter_tensors(loaded.model).values()):
        tensor.data += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)) * 0.05
    if checkpointing:
        checkpoint_layers(loaded.model)
    build = partial(build_optimizer, TrainSection(weight_decay=0.01))
    engine.prepare(LossModel(loaded.model), build, StepSettings(0, 1.0, lambda step: 0.01), loaded.weights)
    return engine


def trained(folder: Path, parallel: ParallelSection, **more: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = engine_on(folder, parallel, **more)
    losses = [engine.step(step, batches(step)).loss for step in range(3)]
    return engine.adapter_state_dict(), losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def save(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        key = {"gpt2": "n_layer", "bloom": "n_layer"}.get(architecture, "num_hidden_layers")
        scrambled(architecture, **{key: LAYERS}).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("llama", {}), ("llama", {"targets": ("q_proj",)}), ("llama", {"dropout": 0.3}), ("llama", {"method": "dora"}),
        ("llama", {"checkpointing": True}), ("llama", {"layers": (3,)}), ("llama", {"init": "pissa"}),
        ("llama", {"modules_to_save": ("o_proj",), "exclude": ("o_proj",)}), ("llama", {"bias": "none", "targets": ("embed_tokens", "v_proj")}),
        ("gpt2", {}), ("gpt2", {"targets": ("c_attn",), "bias": "all"}), ("bloom", {}), ("gemma3_text", {}),
        ("olmo2", {"targets": ("down_proj",)}), ("mixtral", {"targets": ("q_proj",)}),
        ("mixtral", {"targets": ("q_proj",), "target_parameters": "all-experts", "checkpointing": True}),
        ("llama", {"quantize": "nf4"}), ("llama", {"quantize": "int8", "targets": ("up_proj",)}),
    ],
)  # fmt: skip
def test_adapter_and_losses_are_those_of_a_whole_base(saved: Any, architecture: str, more: dict[str, Any]) -> None:
    folder = saved(architecture)
    whole, losses = trained(folder, ParallelSection(), **more)

    streamed, streamed_losses = trained(folder, STREAM, **more)

    assert streamed_losses == losses
    assert streamed.keys() == whole.keys()
    assert all(torch.equal(streamed[name], whole[name]) for name in whole)


def test_two_layers_are_there_and_the_others_cannot_be_read(saved: Any) -> None:
    engine = engine_on(saved("llama"), STREAM)
    layers = engine._model.model.layers
    engine.step(0, batches(0))

    there = [layer.self_attn.q_proj.weight.numel() > 0 for layer in layers]
    assert there == [True, True, False, False, False]  # after backward, ready for the next forward
    assert not any(tensor.is_meta for tensor in adapter_tensors(engine._model).values())

    def nbytes(module: Any) -> int:
        return sum(p.nbytes for p in module.parameters() if not p.requires_grad)

    others = nbytes(engine._model) - sum(map(nbytes, layers))
    assert engine.layout()["base_bytes"] == others + 2 * nbytes(layers[0])
    for part, width in (("self_attn.q_proj", 32), ("mlp.down_proj", 48), ("input_layernorm", 32)):
        with pytest.raises(RuntimeError, match="size|shapes"):
            layers[3].get_submodule(part)(torch.randn(1, 4, width))


def test_an_engine_that_held_all_layers_would_not_pass_for_one_that_streams(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamingEngine, "resident", lambda engine: {"base": 10**9})

    with pytest.raises(Exception, match="a process holds 1,000,000,000 bytes of the base"):
        engine_on(saved("llama"), STREAM)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_layer_is_on_its_way_before_it_is_passed_once_forward_and_once_backward(
    saved: Any, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    engine = engine_on(saved("llama"), STREAM, checkpointing=checkpointing)
    stream: LayerStream = engine._stream
    begin, begun, layers = stream._begin, [], stream.layers

    def counted(layer: Any, slot: torch.Tensor) -> Any:
        begun.append((layers.index(layer), [layers.index(one) for one in layers if one.module in passing]))
        return begin(layer, slot)

    passing: list[Any] = []
    for layer in layers:
        layer.module.register_forward_pre_hook(lambda module, inputs: passing.append(module))
    monkeypatch.setattr(stream, "_begin", counted)
    engine.step(0, batches(0)[:1])

    assert [index for index, _ in begun] == [0, 1, 2, 3, 4, 2, 1, 0]
    assert all(index not in passed for index, passed in begun[:LAYERS])
    begun.clear()
    engine.step(1, batches(1)[:1])
    assert [index for index, _ in begun] == [2, 3, 4, 2, 1, 0]


def test_weights_that_autograd_kept_are_not_taken_for_those_of_another_layer(saved: Any) -> None:
    engine = engine_on(saved("llama"), STREAM)
    stream: LayerStream = engine._stream
    ids = batches(0)[0].input_ids
    with torch.no_grad():
        engine._loss_model(input_ids=ids)  # layers 3 and 4 are there
    weight = engine._model.model.layers[3].self_attn.q_proj.weight
    kept = stream.pack(weight.T)
    assert not isinstance(kept, torch.Tensor)
    found = kept()

    assert torch.equal(found, weight.T)
    assert found.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    with torch.no_grad():
        engine._loss_model(input_ids=ids[:, :1])  # and once more, by way of 0, 1, 2
    assert torch.equal(kept(), found)
    stream._load(1)
    with pytest.raises(RuntimeError, match="layer 3 are needed while layers"):
        kept()


def test_what_cannot_be_read_ends_the_step_and_a_later_one_reads_again(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("llama")
    engine = engine_on(folder, STREAM)
    before = engine.adapter_state_dict()
    size = (folder / "model.safetensors").stat().st_size
    content = (folder / "model.safetensors").read_bytes()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(size // 8)

    with pytest.raises(BaseModelError, match="the file ended while model.layers"):
        engine.step(0, batches(0))
    with pytest.raises(BaseModelError, match="the file ended while model.layers"):
        engine.step(0, batches(0))

    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.adapter_state_dict().items())
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(content)
    assert engine.step(0, batches(0)).loss == engine_on(folder, ParallelSection()).step(0, batches(0)).loss


@pytest.mark.matrix
def test_a_patch_is_the_same_and_the_run_says_what_it_holds(
    recipe: Any, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"model": str(make_base(tmp_path / "base", tokenizer, num_hidden_layers=LAYERS))}
    whole = train(recipe("whole.yaml", base=base, output=str(tmp_path / "whole"))).folder
    assert "streamed" not in capsys.readouterr().out
    parallel = {"offload": "stream"}
    streamed = train(recipe("streamed.yaml", base=base, output=str(tmp_path / "streamed"), parallel=parallel)).folder
    assert "streamed   two layers at a time: base 0." in capsys.readouterr().out

    ours, theirs = (read_patch(folder).layers for folder in (streamed, whole))
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        assert all(torch.equal(tensor, theirs[name].tensors[key]) for key, tensor in layer.tensors.items()), name


@pytest.mark.parametrize(("first", "second"), [(STREAM, ParallelSection()), (ParallelSection(), STREAM)])
def test_a_run_goes_on_in_the_other_way(saved: Any, first: ParallelSection, second: ParallelSection) -> None:
    folder = saved("llama")
    before, after, through = engine_on(folder, first), engine_on(folder, second), engine_on(folder, first)
    before.step(0, batches(0))
    after.load_state_dict(before.state_dict())
    through.step(0, batches(0))

    assert after.step(1, batches(1)) == through.step(1, batches(1))
    found, expected = after.adapter_state_dict(), through.adapter_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


LIMITED = """
import resource, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from lorakit.errors import LorakitError
from tests.parallel.test_streaming import STREAM, ParallelSection, batches, engine_on
base, room, way = sys.argv[1:]
engine_on(Path(base + "-small"), STREAM).step(0, batches(0))  # everything is imported
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(room),) * 2)
engine = engine_on(Path(base), STREAM if way == "stream" else ParallelSection(), targets=("v_proj",))
print(engine.step(0, batches(0)).loss, engine.step(1, batches(1)).loss)
"""


@pytest.mark.spread
@pytest.mark.matrix
def test_a_base_several_times_larger_than_the_memory_trains(tmp_path: Path, tokenizer: Any) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 12}
    make_base(tmp_path / "base", tokenizer, num_hidden_layers=18, **sizes)
    make_base(tmp_path / "base-small", tokenizer)
    room = 180_000_000
    assert (tmp_path / "base" / "model.safetensors").stat().st_size > 3.5 * room

    def done(way: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LIMITED, str(tmp_path / "base"), str(room), way]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    streamed, whole = done("stream"), done("whole")

    assert streamed.returncode == 0, streamed.stderr[-2000:]
    assert whole.returncode != 0
    assert "memory" in whole.stderr
    expected = engine_on(tmp_path / "base", ParallelSection(), targets=("v_proj",))
    losses = [expected.step(step, batches(step)).loss for step in range(2)]
    assert streamed.stdout.splitlines()[-1] == " ".join(map(str, losses))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"backend": "zero3", "offload": "stream", "processes": 2},
            "`stream` for the parameters goes with backend single, got `zero3`",
        ),
        (
            {"backend": "ddp", "offload": {"parameters": "stream"}, "processes": 2},
            "`stream` for the parameters goes with backend single",
        ),
        ({"offload": "cpu"}, "`cpu` for the optimizer goes with backend zero1, zero2, fsdp2 or zero3, got `single`"),
        ({"offload": {"optimizer": "stream"}}, "offload"),
        ({"backend": "auto", "offload": "stream"}, "goes with a backend that is named"),
    ],
)
def test_recipes_say_where_it_goes(recipe: Any, section: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(recipe(parallel=section))


@pytest.mark.matrix
def test_a_plan_knows_that_two_layers_are_there(recipe: Any, tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer, num_hidden_layers=LAYERS)
    found = {}
    for offload in ("none", "stream"):
        rows = plan(load_recipe(recipe(base={"model": str(base)}, parallel={"offload": offload}))).backends
        found[offload] = next(row.memory for row in rows if row.backend == "single")
    engine = open_engine(STREAM)
    loaded = load_for_training(BaseSection(model=str(base)), base, torch.float32, CPU, sharded=True)
    layer = sum(p.nbytes for p in loaded.model.model.layers[0].parameters())
    assert engine.shards_base
    assert found["none"].base - found["stream"].base == (LAYERS - 2) * layer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_layers_from_host_memory_are_those_from_files(saved: Any) -> None:
    folder, device = saved("llama"), torch.device("cuda")
    found = []
    for _ in range(2):
        loaded = load_for_training(BaseSection(model=str(folder)), folder, torch.float32, device, sharded=True)
        layers = streamed_layers(loaded.model)
        assert loaded.weights
        source = host_source(loaded.weights, layers) if found else file_source(loaded.weights)
        stream = LayerStream(layers, source, device)
        seen = []
        for index in (0, 1, 2, 3, 4, 3, 2, 1, 0):
            stream._load(index)
            seen.append(layers[index].module.self_attn.q_proj.weight.clone())
        found.append(seen)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
