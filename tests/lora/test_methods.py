"""Every method, start and kind of target: PEFT's outputs and gradients, exact merges, and patches both ways."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.errors import TargetError
from lorakit.lora import adapter_tensors, inject
from lorakit.lora.inject import checkpoint_tensors
from lorakit.ops.dropout import dropout_mask
from lorakit.patch import read_patch, save_patch, write_patch
from lorakit.patch.model import adapter_from_patch
from lorakit.recipe import Recipe
from lorakit.run.start_from import find_start
from tests.helpers.models import build_variant

IDS = torch.arange(3, 27).reshape(2, 12) % 64


@dataclass(frozen=True)
class Case:
    model: str
    settings: dict[str, Any]
    untie: bool = False


QV = {"targets": ["q_proj", "v_proj"], "rank": 3, "alpha": 5.0}
CASES = {
    "dora": Case("llama", QV | {"method": "dora"}),
    "dora_biased": Case("llama_biased", {"method": "dora", "rank": 3}),
    "dora_conv1d": Case("gpt2", {"method": "rsdora", "rank": 3, "targets": ["c_attn", "c_fc"]}),
    "dora_embedding": Case("llama", {"method": "dora", "rank": 3, "targets": ["embed_tokens", "q_proj"]}),
    "pissa": Case("llama", QV | {"init": "pissa"}),
    "pissa_rslora": Case("gpt2", {"init": "pissa", "method": "rslora", "rank": 3, "targets": ["c_attn"]}),
    "olora": Case("llama", QV | {"init": "olora"}),
    "lora_fa": Case("llama", QV | {"method": "lora_fa"}),
    "embedding": Case("llama", {"rank": 3, "targets": ["embed_tokens", "q_proj"]}),
    "embedding_scaled": Case("gemma3", {"rank": 3, "targets": ["embed_tokens", "q_proj"]}),
    "embedding_of_gpt2": Case("gpt2_untied", {"rank": 3, "targets": ["wte", "c_attn"]}),
    "head": Case("llama", {"rank": 3, "targets": ["lm_head", "q_proj"]}),
    "tied_untied": Case("llama_tied", {"rank": 3, "targets": ["lm_head", "q_proj"], "tied_head": "untie"}, untie=True),
    "bias_lora_only": Case("llama_biased", QV | {"bias": "lora_only"}),
    "bias_all": Case("gpt2", {"rank": 3, "targets": ["c_attn"], "bias": "all"}),
    "saved_head": Case("llama", QV | {"modules_to_save": ["lm_head"]}),
    "saved_norms": Case("llama", QV | {"modules_to_save": ["input_layernorm", "model.norm"]}),
    "tokens": Case("llama", QV | {"trainable_tokens": [5, 3, 60]}),
    "tokens_tied": Case("llama_tied", QV | {"trainable_tokens": [5, 3, 60]}),
    "experts_mixtral": Case("mixtral", QV | {"target_parameters": "all-experts"}),
    "experts_qwen": Case(
        "qwen3_moe",
        QV
        | {
            "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    "experts_gpt_oss": Case("gpt_oss", QV | {"target_parameters": ["experts.gate_up_proj"], "method": "rslora"}),
    "experts_alone": Case("mixtral", {"targets": [], "rank": 2, "target_parameters": ["experts.down_proj"]}),
}


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def trained(case: Case) -> Any:
    """Return the case's model with an adapter that differs from its start."""
    model = inject(build_variant(case.model), **case.settings)
    torch.manual_seed(5)
    for tensor in adapter_tensors(model).values():
        tensor.data += torch.randn_like(tensor) * 0.1
    return model


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (got - expected).norm() <= tolerance * expected.norm()


def peft_names(model: Any) -> dict[str, torch.Tensor]:
    """Return the trained tensors by the names of PEFT's parameters, without ``default``."""
    named = {}
    for name, tensor in adapter_tensors(model).items():
        module, _, part = name.rpartition(".")
        if part in ("lora_A", "lora_B"):
            part = f"{part}.weight"
        named[f"{module}.{part}"] = tensor
    return named


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_that_was_saved_is_read_back_to_the_bit(name: str, tmp_path: Path) -> None:
    model = trained(CASES[name])
    patch = read_patch(save_patch(model, tmp_path / "patch"))

    values = adapter_from_patch(model, patch)

    expected = checkpoint_tensors(model)
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_that_starts_from_a_patch_computes_what_the_patch_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = trained(case)
    folder = save_patch(model, tmp_path / "patch")
    recipe = {
        "base": {"model": "any"}, "data": {"train": "any"}, "output": "out", "adapter": {"start_from": str(folder)}
    }  # fmt: skip
    start = find_start(Recipe.model_validate(recipe))
    assert start is not None

    other = inject(build_variant(case.model), **start.settings, seed=9)
    values = adapter_from_patch(other, read_patch(folder))

    tensors = checkpoint_tensors(other)
    for key, value in values.items():
        tensors[key].data.copy_(value)
    close(logits(other), logits(model), 1e-5)
    assert values.keys() == tensors.keys()


@pytest.mark.parametrize("name", CASES)
def test_untrained_it_changes_nothing(name: str) -> None:
    case = CASES[name]
    expected = logits(build_variant(case.model))

    assert torch.equal(logits(inject(build_variant(case.model), **case.settings)), expected)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own, on tied models and Conv1D
@pytest.mark.parametrize("name", CASES)
def test_peft_reads_what_is_saved_and_computes_the_same_gradients(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = trained(case)
    save_patch(model, tmp_path / "patch")
    peft = PeftModel.from_pretrained(build_variant(case.model), tmp_path / "patch", is_trainable=True).eval()

    got, expected = logits(model), logits(peft)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()

    close(got, expected)
    theirs = [p.grad for p in peft.parameters() if p.requires_grad and p.grad is not None]
    ours = [p.grad for p in adapter_tensors(model).values() if p.grad is not None]
    assert ours
    largest = max(float(gradient.norm()) for gradient in ours)
    for gradient in ours:  # each of lorakit's is among PEFT's; a start at W has twice the rank in PEFT
        parts = [part for other in theirs for part in _alike(other, gradient)]
        assert min(float((part - gradient).norm()) for part in parts) <= 1e-4 * float(gradient.norm()) + 1e-6 * largest


def _alike(theirs: torch.Tensor, ours: torch.Tensor) -> list[torch.Tensor]:
    if theirs.dim() != ours.dim():
        return []
    if theirs.shape == ours.shape:
        return [theirs]
    if theirs.dim() == 2 and theirs.shape == (2 * ours.shape[0], ours.shape[1]):
        return [theirs[: ours.shape[0]]]
    if theirs.dim() == 2 and theirs.shape == (ours.shape[0], 2 * ours.shape[1]):
        return [theirs[:, : ours.shape[1]]]
    return [theirs.T] if theirs.T.shape == ours.shape else []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_peft_saves_is_read_and_written_back_as_it_was(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_patch(trained(case), tmp_path / "ours")
    PeftModel.from_pretrained(build_variant(case.model), tmp_path / "ours").save_pretrained(tmp_path / "theirs")

    patch = read_patch(tmp_path / "theirs")
    write_patch(tmp_path / "again", patch)

    ours = content(tmp_path / "ours")
    for folder in ("theirs", "again"):
        theirs = content(tmp_path / folder)
        known = {key for key in theirs if not key.endswith("base_layer.weight")}  # PEFT adds a targeted embedding
        assert known == ours.keys()
        for key in known:
            assert torch.equal(theirs[key], ours[key]), key


def content(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_merged_files_and_a_loaded_patch_answer_as_the_trained_model(name: str, tmp_path: Path, tokenizer: Any) -> None:
    case = CASES[name]
    build_variant(case.model).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = trained(case)
    save_patch(model, tmp_path / "patch")
    expected = logits(model)

    verify = name != "experts_alone"  # of which no layer could be compared
    merged = lorakit.merge(
        tmp_path / "base", tmp_path / "patch", out=tmp_path / "merged", untie=case.untie, verify=verify
    )

    close(logits(AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")), expected, 3e-5)
    loaded = lorakit.load(tmp_path / "base", {"x": tmp_path / "patch"}, dtype="float32")
    close(loaded(IDS, adapters="x").logits, expected, 3e-5)
    mixed = loaded(IDS, adapters=["x", None]).logits
    close(mixed[0], expected[0], 3e-5)
    close(mixed[1], logits(build_variant(case.model))[1], 3e-5)
    with loaded.merged("x") as copied:
        close(copied(IDS).logits, expected, 3e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_at_a_part_of_the_weight_is_the_one_that_peft_makes(init: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = inject(build_variant("llama"), targets=["q_proj"], rank=3, alpha=6, init=init)
    peft = get_peft_model(
        build_variant("llama"), LoraConfig(target_modules=["q_proj"], r=3, lora_alpha=6, init_lora_weights=init)
    )

    theirs = dict(peft.named_parameters())
    for name in (name for name in adapter_tensors(model) if name.endswith("lora_A")):
        A, B = adapter_tensors(model)[name], adapter_tensors(model)[name.replace("lora_A", "lora_B")]
        other = [theirs[f"base_model.model.{n}.default.weight"] for n in (name, name.replace("lora_A", "lora_B"))]
        close(B @ A, other[1] @ other[0])
        assert torch.equal(A, checkpoint_tensors(model)[name + "0"])


class MaskedDropout(torch.nn.Module):
    """lorakit's dropout of one layer, in PEFT's place for it."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout_mask(x, 0.5, self.layer).apply(x)


def test_dropout_reaches_a_dora_layer_as_in_peft(tmp_path: Path) -> None:
    case = Case("llama", QV | {"method": "dora", "dropout": 0.5})
    model = trained(case).train()
    save_patch(model, tmp_path / "patch")
    peft = PeftModel.from_pretrained(build_variant("llama"), tmp_path / "patch", is_trainable=True).train()
    for name, layer in peft.base_model.model.named_modules():
        if hasattr(layer, "lora_dropout"):  # with our masks, because PEFT draws its own from torch's generator
            layer.lora_dropout["default"] = MaskedDropout(name)

    outputs = []
    for one in (model, peft):
        torch.manual_seed(3)
        outputs.append(logits(one))

    close(*outputs)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            "llama_tied",
            {"targets": ["embed_tokens"]},
            "embed_tokens shares its weight with lm_head. `tied_head: untie`",
        ),
        (
            "llama_tied",
            {"targets": ["embed_tokens"], "tied_head": "both"},
            "tied_head is one of stop, untie; got 'both'",
        ),
        (
            "llama_tied",
            {"targets": ["lm_head"], "tied_head": "untie", "trainable_tokens": [1]},
            "so it has their rows too",
        ),
        ("llama", QV | {"init": "olora", "rank": 17}, "v_proj has no 17 directions of its own, it is 16 x 32"),
        ("llama", QV | {"target_parameters": "all-experts"}, "no experts in 3-D"),
        ("mixtral", QV | {"target_parameters": ["experts.gate_proj"]}, "Did you mean|Nearest"),
        ("mixtral", QV | {"target_parameters": "all-experts", "dropout": 0.1}, "would not reach them"),
        ("mixtral", QV | {"target_parameters": "all-experts", "method": "dora"}, "with method lora, rslora, lora_fa"),
        ("mixtral", {"targets": ["mlp.experts"]}, "adapter.target_parameters: gate_up_proj, down_proj"),
        ("llama", QV | {"modules_to_save": ["lm_hed"]}, "'lm_hed' names no module.*lm_head"),
        ("llama", QV | {"modules_to_save": ["q_proj"]}, "gets an adapter as well"),
        ("llama", QV | {"bias": "all"}, "no layer that it means has a bias"),
        ("llama", QV | {"trainable_tokens": [64]}, r"\[64\] of 64 rows"),
        ("llama", QV | {"trainable_tokens": [1, 1]}, "named twice"),
        ("llama", {"targets": ["embed_tokens"], "trainable_tokens": [1]}, "adapted or trained in full already"),
        ("llama", QV | {"method": "dora", "init": "pissa"}, "pissa"),
        ("llama", {"targets": []}, "nothing is left to adapt"),
    ],
)
def test_what_does_not_go_together_is_refused_and_leaves_the_model(
    model: str, settings: dict[str, Any], message: str
) -> None:
    base = build_variant(model)
    before = copy.deepcopy(base.state_dict())

    with pytest.raises(TargetError, match=message):
        inject(base, **settings)

    assert all(parameter.requires_grad for parameter in base.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_lora_plus_takes_the_steps_that_peft_takes(tmp_path: Path) -> None:
    from peft.optimizers import create_loraplus_optimizer

    from lorakit.parallel.adapter_state import build_optimizer, set_rate
    from lorakit.recipe import TrainSection

    model = trained(Case("llama", QV))
    save_patch(model, tmp_path / "patch")
    peft = PeftModel.from_pretrained(build_variant("llama"), tmp_path / "patch", is_trainable=True)
    ours = build_optimizer(TrainSection(loraplus_lr_ratio=16.0), adapter_tensors(model))
    theirs = create_loraplus_optimizer(peft, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, weight_decay=0.0)

    for one, optimizer in ((model, ours), (peft, theirs)):
        for _ in range(3):
            logits(one).square().mean().backward()
            if optimizer is ours:
                set_rate(optimizer.param_groups, 1e-3)
            optimizer.step()
            optimizer.zero_grad()

    close(logits(model), logits(peft), 1e-4)
    factors = {name: tensor for name, tensor in adapter_tensors(model).items() if "lora_A" in name or "lora_B" in name}
    others = dict(peft.named_parameters())
    for name, tensor in factors.items():
        close(tensor, others[f"base_model.model.{name}.default.weight"], 1e-4)
