"""PEFT is the oracle: from the same tensors, lorakit computes the same outputs and gradients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from lorakit.lora import adapter_tensors, find_targets, inject
from lorakit.lora.layer_kinds import is_linear_like
from lorakit.lora.methods import METHODS
from lorakit.lora.targets import AdapterSpec
from lorakit.patch import read_patch, save_patch
from tests.helpers.models import ARCHITECTURES, build, outputs


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare full tensors to a relative 1e-5, because sums are computed in another order."""
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def randomise(model: Any) -> None:
    torch.manual_seed(5)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_and_gradients_are_those_of_peft(architecture: str, method: str, tmp_path: Path) -> None:
    model = build(architecture)
    reference = copy.deepcopy(model)
    inject(model, method=method, rank=4, alpha=6)
    randomise(model)
    save_patch(model, tmp_path / "patch")
    peft = PeftModel.from_pretrained(reference, tmp_path / "patch", is_trainable=True).eval()

    got, expected = outputs(model, architecture), outputs(peft, architecture)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()

    close(got, expected)
    theirs = {name.replace(".default", ""): p for name, p in peft.named_parameters() if p.requires_grad}
    ours = {f"base_model.model.{name}.weight": p for name, p in adapter_tensors(model).items()}
    not_trained = {name for name in theirs if "lora_A" in name} if method == "lora_fa" else set()  # PEFT trains A there
    assert theirs.keys() - not_trained == ours.keys()
    for name, tensor in ours.items():
        assert (tensor.grad is None) == (theirs[name].grad is None)
        if tensor.grad is not None:
            close(tensor.grad, theirs[name].grad)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own, on GPT-2 and Mixtral
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_linear_means_what_peft_means(architecture: str) -> None:
    model = build(architecture)
    targets_by_lorakit = {target.name for target in find_targets(model, AdapterSpec())}

    theirs = peft_targets(model, target_modules="all-linear")
    # of a mixture of experts PEFT also takes routers and fused experts, which are no linear layers
    assert targets_by_lorakit == {
        name for name in theirs if is_linear_like(dict(model.named_modules()).get(name, model))
    }


def peft_targets(model: Any, **config: Any) -> set[str]:
    task = None if type(model).__name__.startswith("Bert") else "CAUSAL_LM"
    if type(model).__name__.startswith("T5"):
        task = "SEQ_2_SEQ_LM"
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(task_type=task, **config))
    return {name.removeprefix("base_model.model.") for name, m in peft.named_modules() if isinstance(m, LoraLayer)}


LLAMA = build("llama")
SUFFIXES = ["q_proj", "v_proj", "self_attn.o_proj", "mlp.down_proj", "0.mlp.up_proj", "model.layers.1.self_attn.k_proj"]
REGEXES = [r".*\.q_proj", r".*layers\.1\..*proj", r"model\.layers\.0\.(self_attn|mlp)\.[a-z]*_proj"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    targets=st.one_of(st.lists(st.sampled_from(SUFFIXES), min_size=1, unique=True), st.sampled_from(REGEXES)),
    exclude=st.one_of(
        st.none(), st.lists(st.sampled_from(SUFFIXES), min_size=1, unique=True), st.sampled_from(REGEXES)
    ),
    layers=st.one_of(st.none(), st.just([0]), st.just([1]), st.just([0, 1])),
    ranks=st.dictionaries(st.sampled_from([r"layers\.0\..*", "q_proj", "self_attn.o_proj"]), st.integers(1, 9)),
)
def test_names_and_patterns_match_as_in_peft(targets: Any, exclude: Any, layers: Any, ranks: dict[str, int]) -> None:
    """Where lorakit accepts the settings, it adapts the layers that PEFT adapts, with the same ranks."""
    from lorakit.errors import TargetError

    if isinstance(targets, str):
        layers = None
    spec = AdapterSpec(
        targets=targets if isinstance(targets, str) else tuple(targets),
        exclude=exclude if exclude is None or isinstance(exclude, str) else tuple(exclude),
        layers=None if layers is None else tuple(layers), rank_pattern=ranks,
    )  # fmt: skip
    try:
        targets_by_lorakit = {target.name: target.rank for target in find_targets(LLAMA, spec)}
    except TargetError:
        return  # a pattern matched nothing: PEFT goes on, lorakit does not

    config = LoraConfig(target_modules=targets, exclude_modules=exclude, layers_to_transform=layers, rank_pattern=ranks)
    peft = get_peft_model(copy.deepcopy(LLAMA), config)
    theirs = {
        n.removeprefix("base_model.model."): m.r["default"] for n, m in peft.named_modules() if isinstance(m, LoraLayer)
    }
    assert targets_by_lorakit == theirs


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "r": 3, "lora_alpha": 7, "use_rslora": True},
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"q_proj": 5},
            "alpha_pattern": {"q_proj": 9},
        },
        {"target_modules": r".*\.(up|down)_proj", "lora_dropout": 0.3, "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_what_peft_writes_lorakit_reads_and_computes_the_same(config: dict[str, Any], tmp_path: Path) -> None:
    peft = get_peft_model(build("llama"), LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    torch.manual_seed(5)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    peft.save_pretrained(tmp_path)

    patch = read_patch(tmp_path)
    model = build("llama")
    spec = {"rank": patch.config.rank, "alpha": patch.config.alpha, "method": patch.config.method}
    inject(
        model, **spec, targets=list(patch.layers),
        rank_pattern={name.replace(".", r"\."): layer.rank for name, layer in patch.layers.items()},
        alpha_pattern={name.replace(".", r"\."): layer.alpha for name, layer in patch.layers.items()},
    )  # fmt: skip
    for name, tensor in adapter_tensors(model).items():
        module, _, part = name.rpartition(".")
        tensor.data.copy_(patch.layers[module].tensors[part])

    close(outputs(model, "llama"), outputs(peft, "llama"))
