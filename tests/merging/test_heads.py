"""Merging into embeddings and heads, which may be one tensor, two equal ones, or longer than the base's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import lorakit
from lorakit.errors import LorakitError, MergeError, PatchError
from tests.helpers.bases import make_base, tensors_of
from tests.helpers.patches import IDS, exact, make_patch, save_trained_peft


def test_a_head_of_its_own_is_merged(base: Path, tmp_path: Path) -> None:
    head = make_patch(base, tmp_path / "head", targets=["lm_head"])

    out = lorakit.merge(base, head, out=tmp_path / "merged")

    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], exact(before["lm_head.weight"], (head, "lm_head", 1.0)))
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_patch_of_the_inner_model_is_merged_with_its_full_tensors(base: Path, tmp_path: Path) -> None:
    inner = AutoModel.from_pretrained(base, dtype=torch.float32)
    lorakit.inject(inner, rank=2, targets=["q_proj"], modules_to_save=["layers.0.input_layernorm"])
    with torch.no_grad():
        for tensor in lorakit.adapter_tensors(inner).values():
            tensor.add_(0.1)
    trained = lorakit.adapter_tensors(inner)["layers.0.input_layernorm.weight"].detach()
    patch = lorakit.save_patch(inner, tmp_path / "patch")

    merged = tensors_of(lorakit.merge(base, patch, out=tmp_path / "merged", dtype="float32"))
    assert torch.equal(merged["model.layers.0.input_layernorm.weight"], trained)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_head_gets_a_tensor_of_its_own_only_on_request(tmp_path: Path, tokenizer: Any) -> None:
    tied = make_base(tmp_path / "tied", tokenizer, tie_word_embeddings=True)
    AutoModelForCausalLM.from_pretrained(tied).save_pretrained(tied, max_shard_size="200KB")
    (tied / "model.safetensors").unlink()
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(tied), LoraConfig(target_modules=["lm_head"])).eval()
    for key, tensor in peft.named_parameters():
        if "lora_" in key:
            tensor.data.normal_(std=0.1)
    peft.save_pretrained(tmp_path / "patch")

    with pytest.raises(MergeError, match="changes lm_head and not model.embed_tokens in the same way"):
        lorakit.merge(tied, tmp_path / "patch", out=tmp_path / "out")
    out = lorakit.merge(tied, tmp_path / "patch", out=tmp_path / "out", untie=True)

    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = tensors_of(tied), tensors_of(out)
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.allclose(plain(IDS).logits, peft(input_ids=IDS).logits, atol=1e-4)
    assert json.loads((out / "merge.json").read_text())["untied"] is True


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_new_tokens_come_with_their_tokenizer(tmp_path: Path, tokenizer: Any, tie: bool) -> None:
    base = make_base(tmp_path / "base", tokenizer, tie_word_embeddings=tie)
    model = AutoModelForCausalLM.from_pretrained(base)
    grown = AutoTokenizer.from_pretrained(base)
    grown.add_tokens(["<one>", "<two>"])
    model.resize_token_embeddings(len(grown), mean_resizing=False)
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"],
                                            ensure_weight_tying=tie)).eval()  # fmt: skip
    for key, tensor in peft.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            tensor.data.add_(torch.randn_like(tensor) * 0.05)
    peft.save_pretrained(tmp_path / "patch")
    new = torch.tensor([[5, len(grown) - 2, len(grown) - 1, 7]])

    with pytest.raises(MergeError, match=rf"has {len(grown)} rows, the base {len(tokenizer)}, .* holds no tokenizer"):
        lorakit.merge(base, tmp_path / "patch", out=tmp_path / "out")
    with pytest.raises(PatchError, match="does not fit"):
        lorakit.load(base, {"x": tmp_path / "patch"}, dtype="float32")
    grown.save_pretrained(tmp_path / "patch")
    with pytest.raises(LorakitError, match="weight 1"):
        lorakit.merge(base, (tmp_path / "patch", 0.5), out=tmp_path / "out")
    out = lorakit.merge(base, tmp_path / "patch", out=tmp_path / "out")

    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    assert merged.config.vocab_size == len(grown) == len(AutoTokenizer.from_pretrained(out))
    assert merged.config.tie_word_embeddings is tie
    assert torch.allclose(merged(new).logits, peft(input_ids=new).logits, atol=1e-4)


def stored_twice(folder: Path, tokenizer: Any, *, equal: bool) -> Path:
    """A base whose config ties the head, and whose file holds it as well."""
    base = make_base(folder, tokenizer, tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (0.0 if equal else 0.5)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
def test_a_head_that_is_stored_beside_its_embedding_gets_its_update(tmp_path: Path, tokenizer: Any) -> None:
    base = stored_twice(tmp_path / "base", tokenizer, equal=True)
    model = save_trained_peft(
        tmp_path / "p", base, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )

    out = lorakit.merge(base, tmp_path / "p", out=tmp_path / "out")

    after = load_file(out / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.allclose(plain(IDS).logits, model(input_ids=IDS).logits, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
def test_a_tied_base_whose_stored_head_differs_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    base = stored_twice(tmp_path / "base", tokenizer, equal=False)
    save_trained_peft(tmp_path / "p", base, target_modules=["embed_tokens"])
    for untie in (False, True):
        with pytest.raises(MergeError, match="tie"):
            lorakit.merge(base, tmp_path / "p", out=tmp_path / "out", untie=untie)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own
def test_new_tokens_on_a_tied_base_merge_with_a_head_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer) + 2, mean_resizing=False)
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))
    for key, tensor in peft.eval().named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            tensor.data.add_(torch.randn_like(tensor) * 0.1)
    peft.save_pretrained(tmp_path / "p")
    tokenizer.save_pretrained(tmp_path / "p")

    with pytest.raises(MergeError, match="Say --untie"):
        lorakit.merge(base, tmp_path / "p", out=tmp_path / "out")
    with pytest.raises(MergeError, match="leave --verify out"):
        lorakit.merge(base, tmp_path / "p", out=tmp_path / "out", untie=True, verify=True)
    out = lorakit.merge(base, tmp_path / "p", out=tmp_path / "out", untie=True)

    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.allclose(merged(IDS).logits, peft(input_ids=IDS).logits, atol=1e-4)
