"""What reviewers broke: each was wrong once, silently or with a traceback."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.cli import main
from lorakit.errors import BaseModelError, LorakitError, MergeError, PatchError
from lorakit.files.base_files import open_base_files
from tests.helpers.bases import make_base
from tests.helpers.models import ARCHITECTURES, build
from tests.helpers.patches import IDS, make_patch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def peft_patch(folder: Path, base: Path, **config: Any) -> Any:
    """A PEFT model on a base with every trainable tensor changed, saved."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**config)).eval()
    torch.manual_seed(3)
    for key, tensor in model.named_parameters():
        if tensor.requires_grad and ("lora_" in key or "modules_to_save" in key):
            tensor.data.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return model


def stored_twice(folder: Path, tokenizer: Any, *, equal: bool) -> Path:
    """A base whose config ties the head, and whose file holds it as well."""
    base = make_base(folder, tokenizer, tie_word_embeddings=True)
    held = load_file(base / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone() + (0.0 if equal else 0.5)
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    return base


def test_a_head_that_is_stored_beside_its_embedding_gets_what_it_gets(tmp_path: Path, tokenizer: Any) -> None:
    base = stored_twice(tmp_path / "base", tokenizer, equal=True)
    model = peft_patch(
        tmp_path / "p", base, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )

    out = lorakit.merge(base, tmp_path / "p", out=tmp_path / "out")

    after = load_file(out / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.allclose(plain(IDS).logits, model(input_ids=IDS).logits, atol=1e-4)


def test_a_tied_base_whose_stored_head_differs_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    base = stored_twice(tmp_path / "base", tokenizer, equal=False)
    peft_patch(tmp_path / "p", base, target_modules=["embed_tokens"])
    for untie in (False, True):
        with pytest.raises(MergeError, match="tie"):
            lorakit.merge(base, tmp_path / "p", out=tmp_path / "out", untie=untie)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", [(1e-30,), (1e-12,)])
def test_a_merge_that_moves_no_stored_value_is_refused(
    tmp_path: Path, tokenizer: Any, weights: tuple[float, ...]
) -> None:
    base = make_base(tmp_path / "base", tokenizer, dtype=torch.bfloat16)
    patch = make_patch(base, tmp_path / "p", torch.bfloat16)
    with pytest.raises(MergeError, match="nothing would change"):
        lorakit.merge(base, (patch, weights[0]), out=tmp_path / "out")
    with pytest.raises(MergeError, match="named twice; to apply it with weight 2"):
        lorakit.merge(base, (patch, 1.0), (patch, -1.0), out=tmp_path / "out")


def test_a_small_update_survives_a_conversion(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    patch = make_patch(base, tmp_path / "p")
    out = lorakit.merge(base, (patch, 1e-4), out=tmp_path / "out", dtype="bfloat16")
    assert any(line["changed"] for line in json.loads((out / "merge.json").read_text())["merged"])


def test_inputs_that_change_under_a_merge_are_noticed(tmp_path: Path, base: Path) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    one, two = make_patch(own, tmp_path / "one"), make_patch(own, tmp_path / "two", seed=1)

    def replace(text: str) -> None:
        (two / "adapter_model.safetensors").replace(one / "adapter_model.safetensors")

    with pytest.raises(MergeError, match="changed while it was merged; nothing was written"):
        lorakit.merge(own, one, out=tmp_path / "out", say=replace)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_two_sets_of_weights_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded, max_shard_size="50KB")
    shutil.copytree(sharded, base, dirs_exist_ok=True)
    with pytest.raises(BaseModelError, match="holds model.safetensors and an index of other files"):
        open_base_files(base)


def test_a_name_is_not_bound_to_another_modules_tensor(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    patch = make_patch(base, tmp_path / "p", targets=["lm_head"])
    held = load_file(base / "model.safetensors")
    held["draft.lm_head.weight"] = held.pop("lm_head.weight")
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"no tensors for 'lm_head.weight'"):
        lorakit.merge(base, patch, out=tmp_path / "out", allow_base_mismatch=True)


def test_whole_numbers_and_complex_tensors_are_told_apart(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    held = load_file(base / "model.safetensors")
    for name, one, two in (
        ("int", torch.tensor([2**60]), torch.tensor([2**60 + 1])), ("complex", torch.tensor([1j]), torch.tensor([2j])),
    ):  # fmt: skip
        folders = [shutil.copytree(base, tmp_path / f"{name}{number}") for number in range(2)]
        for folder, value in zip(folders, (one, two), strict=True):
            save_file({**held, "buffer": value}, folder / "model.safetensors", metadata={"format": "pt"})
        assert not lorakit.diff(*folders, say=lambda text: None)


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


def test_a_whole_position_embedding_gets_all_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("opt").save_pretrained(tmp_path / "base")
    shutil.copy(Path(lorakit.__file__).parent / "assets" / "tiny" / "tokenizer.json", tmp_path / "base")
    shutil.copy(Path(lorakit.__file__).parent / "assets" / "tiny" / "tokenizer_config.json", tmp_path / "base")
    oracle = peft_patch(
        tmp_path / "p", tmp_path / "base", target_modules=["q_proj"], modules_to_save=["embed_positions"]
    )
    ours = lorakit.load(tmp_path / "base", {"x": tmp_path / "p"}, dtype="float32")
    ids = torch.arange(3, 17).reshape(2, 7)

    def cached(model: Any, **how: Any) -> torch.Tensor:
        start = model(input_ids=ids[:, :6], use_cache=True, **how)
        mask = torch.ones(2, 7, dtype=torch.long)
        step = model(input_ids=ids[:, 6:], past_key_values=start.past_key_values, attention_mask=mask, **how)
        result: torch.Tensor = step.logits
        return result

    with torch.no_grad():
        assert torch.allclose(cached(ours, adapters="x"), cached(oracle), atol=1e-5)
    with pytest.raises(LorakitError, match="mixes rows|adapters cannot be chosen per row"):
        ours(ids[:, :5].repeat(2, 1), adapters=["x", None, "x", None], position_ids=torch.arange(5)[None])


def test_a_whole_layer_that_is_read_past_its_call_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    ARCHITECTURES["mamba"] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    build("mamba").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    del ARCHITECTURES["mamba"]
    peft_patch(tmp_path / "p", tmp_path / "base", target_modules=["in_proj"], modules_to_save=["conv1d"])
    with pytest.raises(PatchError, match="reads without calling the layer"):
        lorakit.load(tmp_path / "base", {"x": tmp_path / "p"}, dtype="float32")


def test_a_merged_block_ends_its_answers_where_the_base_does(tmp_path: Path, base: Path) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    patch = make_patch(own, tmp_path / "p")
    free = lorakit.load(own, {"x": patch}, dtype="float32")
    answer = free.tokenizer(free.generate(["say it"], "x", max_new_tokens=12)[0], add_special_tokens=False)["input_ids"]
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [answer[3]]}))

    model = lorakit.load(own, {"x": patch}, dtype="float32")

    expected = model.generate(["say it"], "x", max_new_tokens=12)
    with model.merged("x") as merged:
        assert (
            merged.generate(["say it"], max_new_tokens=12)
            == expected
            != free.generate(["say it"], "x", max_new_tokens=12)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj"]}, "v_proj is not selected by the patch's target_modules"),
        (
            {"target_modules": ["q_proj", "v_proj", "k_proj"]},
            "k_proj is selected by target_modules, and the patch holds no",
        ),
        ({"exclude_modules": ["q_proj"]}, "q_proj is not selected"),
        ({"layers_to_transform": [1]}, "layers.0.self_attn.q_proj is not selected"),
    ],
)
def test_tensors_and_the_settings_that_select_them_agree(
    tmp_path: Path, base: Path, changes: dict[str, Any], message: str
) -> None:
    patch = make_patch(base, tmp_path / "p", targets=["q_proj", "v_proj"])
    config = json.loads((patch / "adapter_config.json").read_text())
    (patch / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(PatchError, match=message):
        lorakit.load(base, {"x": patch}, dtype="float32")
    assert PeftModel


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge", "{base}", "{patch}", "--out", "{out}", "--seed", "0"],
        ["merge", "{base}", "{patch}:nan", "--out", "{out}"],
        ["merge", "{patch}", "builtin:tiny", "--out", "{out}"],
        ["merge", "{base}", "{patch}", "--out", "{base}/out"],
        ["generate", "{base}", "--prompt", "hi", "--temperature", "1e-40"],
        ["generate", "{base}", "--prompt", "hi", "--temperature", "1", "--seed", "99999999999999999999"],
        ["generate", "{base}", "--adapter", "a={patch}", "--each", "--use", "b", "--prompt", "x"],
        ["score", "{base}", "--adapter", "a={patch}", "--data", "a={empty}"],
        ["show", "{patches}"],
        ["diff", "{patch}", "{patch}x"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[-2:]),
)
def test_mistakes_of_the_command_line_are_one_block(
    tmp_path: Path, base: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    patch = make_patch(base, tmp_path / "patches" / "p")
    (tmp_path / "empty.jsonl").write_text("")
    names = {"base": base, "patch": patch, "out": tmp_path / "out", "empty": tmp_path / "empty.jsonl",
             "patches": tmp_path / "patches"}  # fmt: skip

    assert main([argument.format(**names) for argument in arguments]) == 2
    assert capsys.readouterr().err.startswith(f"lorakit {arguments[0]}:")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", [{"hidden_size": "abc"}, {"num_attention_heads": 0}, {"hidden_act": "nope"}])
def test_a_broken_config_is_an_error_that_names_the_folder(tmp_path: Path, base: Path, setting: dict[str, Any]) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(BaseModelError, match="transformers cannot load it"):
        lorakit.merge(own, make_patch(base, tmp_path / "p"), out=tmp_path / "out")
