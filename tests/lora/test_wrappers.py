"""A model that another training loop wraps or shards: its patch is that of the plain model, or its call is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModel, AutoModelForCausalLM

import lorakit
from lorakit.errors import PatchError, TargetError
from tests.helpers.fork_server import PIPE, ROOT, STDOUT, start_python

LOOP = """
import os, sys
import torch
import torch.distributed as dist
import lorakit
from tests.lora.test_wrappers import adapted, train

kind, base, out, store, rank, size = *sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
model = adapted(base)
own = lorakit.adapter_tensors(model)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif kind.startswith("fsdp2"):
    from torch.distributed.fsdp import fully_shard
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
else:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    import deepspeed
    from lorakit.parallel._internals import forbid_operation
    forbid_operation("deepspeed_shm_comm")
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": int(kind[-1])},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(own.values(), lr=0.5)
    model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
train(model, rank, size)
assert lorakit.adapter_tensors(model).keys() == own.keys()
if kind == "fsdp2 gathered":  # copies of other values stay after a forward
    shards = list(lorakit.adapter_tensors(model).values())
    trained = [shard.detach().clone() for shard in shards]
    with torch.no_grad():
        for shard in shards:
            shard.zero_()
        model.set_reshard_after_forward(False)
        model(input_ids=torch.arange(5)[None])
        for shard, value in zip(shards, trained):
            shard.copy_(value)
if kind == "fsdp2 alone":
    import lorakit.lora.wrappers
    lorakit.lora.wrappers.MEET_SECONDS = 0.5
if rank == 0 or kind != "fsdp2 alone":
    try:
        lorakit.save_patch(model, out)
    except lorakit.LorakitError as problem:
        print(problem)
        sys.exit()
elif kind == "fsdp2 alone":
    try:
        dist.barrier()
    except RuntimeError:  # the other process has ended
        sys.exit()
if kind != "zero2":
    try:
        lorakit.remove(model)
    except lorakit.LorakitError as problem:
        print(problem)
dist.barrier()
"""


def adapted(base: str | Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return lorakit.inject(model, rank=3, alpha=6, seed=1)


def train(model: Any, rank: int = 0, size: int = 1) -> None:
    """Two steps on four rows of equal length, a part of them in each process."""
    rows = torch.arange(48).view(4, 12) + 5
    is_deepspeed = hasattr(model, "zero_optimization")
    optimizer = None if is_deepspeed else torch.optim.SGD(lorakit.adapter_tensors(model).values(), lr=0.5)
    for _ in range(2):
        own = rows[rank::size]
        loss = model(input_ids=own, labels=own).loss
        if optimizer is None:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def plain(base: Path, tmp_path: Path) -> Path:
    model = adapted(base)
    train(model)
    return lorakit.save_patch(model, tmp_path / "plain")


def assert_same_patch(folder: Path, plain: Path) -> None:
    one, other = (load_file(each / "adapter_model.safetensors") for each in (folder, plain))
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert tensor.any()
        assert torch.allclose(one[name], tensor, atol=1e-5), name
    facts = [lorakit.read_patch(each).metadata["base"] for each in (folder, plain)]
    assert facts[0] == facts[1]


@pytest.mark.spread
@pytest.mark.parametrize(
    "kind",
    ["ddp", "fsdp2 gathered", "zero3", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("fsdp2", "zero2"))],
)
def test_the_patch_of_processes_is_that_of_the_plain_loop(kind: str, base: Path, plain: Path, tmp_path: Path) -> None:
    outputs = run_loop(kind, base, tmp_path)

    assert_same_patch(tmp_path / "patch", plain)
    if kind in ("ddp", "fsdp2", "fsdp2 gathered"):
        reason = "wraps this model" if kind == "ddp" else "is sharded over processes"
        assert all(reason in output for output in outputs)


def run_loop(kind: str, base: Path, folder: Path) -> list[str]:
    arguments = (kind, base, folder / "patch", folder / "store")
    ranks = [start_python("-c", LOOP, *arguments, rank, 2, cwd=ROOT, stdout=PIPE, stderr=STDOUT) for rank in range(2)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


@pytest.mark.spread
def test_a_process_that_does_not_come_is_named_before_tensors_are_gathered(base: Path, tmp_path: Path) -> None:
    outputs = run_loop("fsdp2 alone", base, tmp_path)
    assert "one did not call it within 0.5 s; call it on every rank" in outputs[0]
    assert "Ranks 1 failed" in outputs[0]
    assert not (tmp_path / "patch").exists()


class Trainer(nn.Module):
    """As a LightningModule: a module of a trainer's own, around the model."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.metric = nn.Linear(2, 2).requires_grad_(False)


def test_a_module_around_the_model_is_refused_by_the_names_of_injection(base: Path, tmp_path: Path) -> None:
    own = lorakit.inject(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), targets="all-linear")
    for model in (adapted(base), own):
        with pytest.raises(PatchError, match=r"lm\..* when it was injected, .* save the model inside of it"):
            lorakit.save_patch(Trainer(model), tmp_path / "patch")
    assert not (tmp_path / "patch").exists()


def test_a_trained_tensor_that_a_patch_would_lack_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    model.model.norm.weight.requires_grad_()
    with pytest.raises(PatchError, match=r"model\.norm\.weight can be trained and is no part of the adapter"):
        lorakit.save_patch(model, tmp_path / "patch")
    assert not (tmp_path / "patch").exists()


def test_a_model_whose_values_are_elsewhere_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    weight = model.model.layers[0].self_attn.q_proj
    weight.register_parameter("weight", nn.Parameter(weight.weight.to("meta"), requires_grad=False))
    for call in (lorakit.remove, lorakit.merge_into, lambda model: lorakit.save_patch(model, tmp_path / "patch")):
        with pytest.raises(lorakit.LorakitError, match=r"q_proj\.weight is on the meta device"):
            call(model)


def test_a_patch_of_the_inner_model_goes_onto_the_one_with_a_head(base: Path, tmp_path: Path) -> None:
    inner = AutoModel.from_pretrained(base, dtype=torch.float32)
    patch = lorakit.save_patch(lorakit.inject(inner, rank=2), tmp_path / "patch")
    lorakit.load_patch(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), patch)


@pytest.mark.parametrize("wrap", [
    pytest.param(lambda model: torch.compile(model, backend="eager"), id="compile"),
    pytest.param(nn.DataParallel, id="data parallel"),
    pytest.param(lambda model: in_layers(model, lambda layer: torch.compile(layer, backend="eager")), id="layers"),
    pytest.param(lambda model: in_layers(model, checkpoint_wrapper), id="recomputed layers"),
    pytest.param(lambda model: torch.compile(in_layers(model, checkpoint_wrapper), backend="eager"), id="both"),
])  # fmt: skip
def test_a_wrapper_changes_no_name_of_a_patch(
    wrap: Callable[[Any], Any], base: Path, plain: Path, tmp_path: Path
) -> None:
    inside = adapted(base)
    names = list(lorakit.adapter_tensors(inside))
    train(inside)
    model = wrap(inside)
    assert list(lorakit.adapter_tensors(model)) == names
    patch = lorakit.save_patch(model, tmp_path / "patch")

    assert_same_patch(patch, plain)
    again = lorakit.load_patch(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), patch)
    in_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), patch)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, in_peft(ids).logits, atol=1e-5)
    for call in (lorakit.remove, lorakit.merge_into):
        with pytest.raises(TargetError, match=f"{call.__name__}: .* wraps this model"):
            call(model)
    unadapted = wrap(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    with pytest.raises(TargetError, match="call inject on the model without it"):
        lorakit.inject(unadapted)
    with pytest.raises(TargetError, match="load_patch: .* wraps this model"):
        lorakit.load_patch(unadapted, patch)


def in_layers(model: Any, wrap: Callable[[nn.Module], Any]) -> Any:
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = wrap(layer)
    return model
