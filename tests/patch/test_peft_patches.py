"""Adapters written by the real PEFT: read, served, merged and written again, with PEFT as the judge."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import lorakit
from lorakit.cli import main
from lorakit.errors import BaseModelError, LorakitError, PatchError
from lorakit.patch import read_patch, write_patch
from lorakit.patch.compatibility import compatible_programs
from lorakit.patch.peft_names import PREFIX
from lorakit.patch.prompting import CHAT
from tests.helpers.models import build, scrambled
from tests.helpers.patches import TENSORS, peft_model, save_peft_patch, save_trained_peft

IDS = torch.arange(3, 27).reshape(2, 12) % 64
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PEFT's own


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).norm() <= 2e-5 * expected.norm())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all linear": ("qwen3", {"target_modules": "all-linear", "r": 3, "lora_alpha": 7.5}),
    "regex and rslora": ("llama", {"target_modules": r".*\.(up|down)_proj", "use_rslora": True, "r": 5}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "up_proj"], "rank_pattern": {r"layers\.1\..*": 3, "up_proj": 6},
            "alpha_pattern": {"up_proj": 4.25},
        },
    ),
    "one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"], "r": 4}),
    "scaled embedding": ("gemma3_text", {"target_modules": ["embed_tokens"], "r": 4, "use_rslora": True}),
    "embedding alone": ("gpt2", {"target_modules": ["wte"]}),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "tied head": ("gpt2", {"target_modules": ["lm_head"]}),
    "biases of adapted layers": ("opt", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "biases of B": ("opt", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "lora_alpha": 32}),
    "a Linear's weight": ("llama", {"target_modules": ["q_proj"], "target_parameters": ["0.mlp.up_proj.weight"]}),
    "every bias": ("opt", {"target_modules": ["q_proj", "fc1"], "bias": "all"}),
    "whole modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "whole tied embedding": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    "embedding with its head": ("gemma3_text", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "head with its embedding": ("gemma3_text", {"target_modules": ["lm_head"], "ensure_weight_tying": True}),
    "whole embedding with its head": (
        "gemma3_text", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["default", "sql"])
def test_what_peft_writes_is_served_merged_and_written_back(
    case: str, name: str, tmp_path: Path, tokenizer: Any
) -> None:
    architecture, config = CASES[case]
    base, folder, peft = save_peft_patch(tmp_path, architecture, tokenizer, name, **config)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
        plain = build(architecture)(input_ids=IDS).logits
    assert not close(plain, expected)

    model = lorakit.load(base, {"x": folder}, dtype="float32")
    assert close(model(IDS, adapters="x").logits, expected)
    if case != "every bias":  # OPT lays the rows of a batch end to end before some of its layers
        assert close(model(IDS, adapters=["x", None]).logits, torch.cat([expected[:1], plain[1:]]))
        first = torch.cat([model(IDS[:1, :1], adapters="x").logits, model(IDS[1:, :1]).logits])
        assert close(model(IDS[:, :1], adapters=["x", None]).logits, first)  # one token: adapters side by side
    assert torch.equal(model(IDS).logits, plain)
    with model.merged("x") as merged:
        assert close(merged(IDS).logits, expected)

    rewritten = write_patch(tmp_path / "rewritten", read_patch(folder))
    before, after = load_file(folder / "adapter_model.safetensors"), load_file(rewritten / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    assert json.loads((folder / "adapter_config.json").read_text()) == json.loads(
        (rewritten / "adapter_config.json").read_text()
    )
    assert close(PeftModel.from_pretrained(build(architecture), rewritten).eval()(input_ids=IDS).logits, expected)

    out = merge_somehow(base, folder, tmp_path / "merged")
    assert close(lorakit.load(out, dtype="float32")(IDS).logits, expected)


@pytest.mark.parametrize("case", [case for case, (_, config) in CASES.items() if "ensure_weight_tying" in config])
def test_training_goes_on_from_a_patch_that_changes_embedding_and_head_alike(
    case: str, tmp_path: Path, tokenizer: Any
) -> None:
    architecture, config = CASES[case]
    base, folder, peft = save_peft_patch(tmp_path, architecture, tokenizer, **config)

    model = lorakit.load_patch(build(architecture), folder)

    with torch.no_grad():
        assert close(model(input_ids=IDS).logits, peft(input_ids=IDS).logits)
    again = lorakit.load_patch(build(architecture), lorakit.save_patch(model, tmp_path / "again"))
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_tied_head_and_embedding_with_magnitudes_are_merged_apart(tmp_path: Path, tokenizer: Any) -> None:
    config = {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True, "ensure_weight_tying": True}
    base, folder, peft = save_peft_patch(tmp_path, "gemma3_text", tokenizer, **config)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits

    with pytest.raises(LorakitError, match="--untie"):
        lorakit.merge(base, folder, out=tmp_path / "merged")
    out = lorakit.merge(base, folder, out=tmp_path / "merged", untie=True, verify=True)

    assert close(lorakit.load(out, dtype="float32")(IDS).logits, expected)


def test_an_update_of_a_resized_tied_embedding_is_merged_with_peft_s_head(tmp_path: Path, tokenizer: Any) -> None:
    model = scrambled("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(72)
    peft = get_peft_model(model, LoraConfig(target_modules=["embed_tokens"], task_type="CAUSAL_LM")).eval()
    peft.get_parameter("base_model.model.model.embed_tokens.lora_embedding_B.default").data.normal_()
    peft.save_pretrained(tmp_path / "patch")
    tokenizer.save_pretrained(tmp_path / "patch")
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits

    out = lorakit.merge(tmp_path / "base", tmp_path / "patch", out=tmp_path / "merged", untie=True)

    assert close(lorakit.load(out, dtype="float32")(IDS).logits, expected)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_that_are_declared_and_not_there_are_missed(bias: str, tmp_path: Path, tokenizer: Any) -> None:
    base, folder, _ = save_peft_patch(tmp_path, "opt", tokenizer, target_modules=["q_proj"], bias=bias)
    rename_keys(folder, lambda key: key if "lora_" in key else None)
    for use in (lambda: lorakit.load(base, {"x": folder}), lambda: lorakit.merge(base, folder, out=tmp_path / "out")):
        with pytest.raises(PatchError, match=rf"\.bias is trained \(bias: {bias}\), and the patch holds no tensor"):
            use()


WRAPPERS: dict[str, Callable[[str], str]] = {
    "torch.compile, outside": lambda key: f"_orig_mod.{key}",
    "torch.compile, inside": lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "DDP": lambda key: f"module.{key}",
    "PEFT's own state dict": lambda key: re.sub(r"(lora_(?:embedding_)?[AB])", r"\1.default", key),
    "without PEFT's prefix": lambda key: key.removeprefix(PREFIX),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_with_a_wrapper_are_read_without_it_and_said(wrapper: str, tmp_path: Path, tokenizer: Any) -> None:
    config = {"target_modules": ["q_proj", "embed_tokens"]}
    base, folder, peft = save_peft_patch(tmp_path, "llama", tokenizer, **config)
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    rename_keys(folder, lambda key: WRAPPERS[wrapper](key) if "lora_" in key else key)

    model = lorakit.load(base, {"x": folder}, dtype="float32")

    assert close(model(IDS, adapters="x").logits, expected)
    assert "PEFT ignores names such as" in model.notes[0]
    assert all(program.problems for program in compatible_programs(read_patch(folder)))


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    _, folder, _ = save_peft_patch(tmp_path, "llama", tokenizer, target_modules=["q_proj"])
    tensors = load_file(folder / TENSORS)
    for wrapped in ("{}", "_orig_mod.{}"):
        both = {name.format(key): tensor.clone() for key, tensor in tensors.items() for name in (wrapped, "module.{}")}
        save_file(both, folder / TENSORS)
        with pytest.raises(PatchError, match="holds a tensor under two names, one with a wrapper such as"):
            read_patch(folder)


def test_targets_that_peft_would_take_from_its_own_table_are_asked_for(tmp_path: Path, tokenizer: Any) -> None:
    _, folder, _ = save_peft_patch(tmp_path, "llama", tokenizer, target_modules="all-linear")
    edit_config(folder, target_modules=None)
    with pytest.raises(PatchError, match="target_modules is null.* the file has down_proj, gate_proj, k_proj"):
        read_patch(folder)


def test_a_patch_of_the_class_without_a_head_is_shown_and_merged_as_it_is_loaded(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder, peft = save_peft_patch(tmp_path, "llama", tokenizer, target_modules=["q_proj"])
    with torch.no_grad():
        expected = peft(input_ids=IDS).logits
    rename_keys(folder, lambda key: key.replace(f"{PREFIX}model.", PREFIX))
    edit_config(folder, task_type="FEATURE_EXTRACTION")

    assert close(lorakit.load(base, {"x": folder}, dtype="float32")(IDS, adapters="x").logits, expected)
    merged = lorakit.merge(base, folder, out=tmp_path / "merged", verify=True)
    assert close(lorakit.load(merged, dtype="float32")(IDS).logits, expected)
    assert main(["show", str(folder), "--for", str(base)]) == 0
    assert "model.layers.{0-1}.self_attn.q_proj" in capsys.readouterr().out


def test_a_tokenizer_beside_a_patch_is_used_or_asked_for(tmp_path: Path, tokenizer: Any) -> None:
    """As unsloth leaves it: new tokens in spare rows of the base, and the chat template of training."""
    model = scrambled("llama", vocab_size=len(tokenizer) + 8)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    save_trained_peft(tmp_path / "patch", tmp_path / "base", target_modules=["q_proj"])
    own = copy.deepcopy(tokenizer)
    own.save_pretrained(tmp_path / "patch")
    lorakit.load(tmp_path / "base", {"x": tmp_path / "patch"})  # the base's own
    own.add_tokens(["<|tool|>"])
    own.chat_template = "{% for m in messages %}<|tool|>{{ m.content }}{% endfor %}"
    own.save_pretrained(tmp_path / "patch")
    arguments = tmp_path / "base", {"x": tmp_path / "patch"}

    expected = r"another chat template and 1 more token \(<\|tool\|>\).* --tokenizer"
    with pytest.raises(PatchError, match=expected):
        lorakit.load(*arguments)
    with pytest.raises(PatchError, match=expected):
        lorakit.merge(tmp_path / "base", tmp_path / "patch", out=tmp_path / "merged")
    lorakit.load(*arguments, allow={"template"})
    loaded = lorakit.load(*arguments, tokenizer=tmp_path / "patch")
    assert loaded.codec(None).token_ids([{"role": "user", "content": "a"}], CHAT)[0] == len(tokenizer)
    merged = lorakit.merge(tmp_path / "base", tmp_path / "patch", out=tmp_path / "merged", tokenizer=tmp_path / "patch")
    again = AutoTokenizer.from_pretrained(merged)
    assert again.convert_tokens_to_ids("<|tool|>") == len(tokenizer)
    assert again.chat_template == own.chat_template


def test_a_chat_template_by_name_goes_with_a_patch_that_records_none(tmp_path: Path, tokenizer: Any) -> None:
    base, folder, _ = save_peft_patch(tmp_path, "llama", tokenizer, target_modules=["q_proj"])
    lorakit.load(base, {"x": folder}, chat_template="chatml")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_experts_of_older_peft_are_refused_where_it_exchanged_in_and_out(
    architecture: str, tmp_path: Path, tokenizer: Any
) -> None:
    """The shapes are square, so that they do not show it. Experts that are stored transposed were right before too."""
    model = scrambled(architecture, moe_intermediate_size=32, intermediate_size=32, decoder_sparse_step=1)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    save_trained_peft(tmp_path / "patch", tmp_path / "base", **config)
    lorakit.load(tmp_path / "base", {"x": tmp_path / "patch"})
    edit_config(tmp_path / "patch", peft_version="0.18.1")
    if architecture == "gpt_oss":
        lorakit.load(tmp_path / "base", {"x": tmp_path / "patch"})
        return
    with pytest.raises(PatchError, match="PEFT 0.18.1 wrote its factors with in and out exchanged"):
        lorakit.load(tmp_path / "base", {"x": tmp_path / "patch"})


def test_a_patch_of_a_loop_says_what_peft_leaves_out_as_a_trained_one_does(tmp_path: Path) -> None:
    model = lorakit.inject(scrambled("deepseek_v3"), targets="all-linear")
    for name, base_model in (("named", "org/deepseek"), ("nameless", None)):
        folder = lorakit.save_patch(model, tmp_path / name, base_model=base_model)
        (program, *_) = compatible_programs(read_patch(folder))
        assert "layers for experts, whose names these had" in program.problems[0]
        card = (folder / "README.md").read_text()
        assert f"PEFT computes something else: {program.problems[0]}." in card
        assert "from_pretrained" not in card


def test_the_card_of_a_patch_that_peft_reads_offers_it(tmp_path: Path) -> None:
    model = lorakit.inject(scrambled("llama"), targets=["q_proj"])
    named = lorakit.save_patch(model, tmp_path / "named", base_model="org/llama")
    nameless = lorakit.save_patch(model, tmp_path / "nameless")
    assert (
        "or merge it: `lorakit merge org/llama PATH --out DIR`.\nWith PEFT: `PeftModel.from_pretrained(base, path)`."
        in (named / "README.md").read_text()
    )
    assert "`PeftModel.from_pretrained(model, path)` puts it onto" in (nameless / "README.md").read_text()


def test_extract_does_not_advise_what_it_cannot_do(tmp_path: Path, tokenizer: Any) -> None:
    model = build("mixtral")
    for name in ("base", "tuned"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        model.get_parameter("model.layers.0.mlp.experts.down_proj").data.add_(1)
    for rest in ("refuse", "save"):
        with pytest.raises(PatchError, match="experts.* differs, and a patch cannot hold it"):
            lorakit.extract(tmp_path / "base", tmp_path / "tuned", rank=4, out=tmp_path / "out", rest=rest)


def test_an_index_without_metadata_is_refused_with_its_remedy(tmp_path: Path, tokenizer: Any) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    tokenizer.save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(BaseModelError, match='has no "metadata"; add'):
        lorakit.load(tmp_path)


def rename_keys(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Save the tensors of a patch under other names; None leaves one out."""
    tensors = load_file(folder / TENSORS)
    named = {rename(key): tensor for key, tensor in tensors.items()}
    save_file({key: tensor for key, tensor in named.items() if key}, folder / TENSORS, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def merge_somehow(base: Path, folder: Path, out: Path) -> Path:
    """Merged as it is, or with a head of its own where only one of two tied tensors changes."""
    try:
        return lorakit.merge(base, folder, out=out, verify=True)
    except LorakitError as problem:
        assert "--untie" in str(problem)
        return lorakit.merge(base, folder, out=out, untie=True, verify=True)


MODULES = {
    "llama": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte"],
    "opt": ["q_proj", "v_proj", "fc2", "out_proj"],
    "mixtral": ["q_proj", "v_proj", "lm_head"],
}


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, dict[str, Any], torch.dtype, str]:
    """An architecture, settings of PEFT, a dtype of storage and a name for the adapter."""
    architecture = draw(st.sampled_from(sorted(MODULES)))
    modules = MODULES[architecture]
    targets = draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    config: dict[str, Any] = {
        "target_modules": targets,
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(st.one_of(st.integers(1, 40), st.floats(0.5, 40, allow_nan=False).map(lambda x: round(x, 3)))),
        "use_rslora": draw(st.booleans()),
        "lora_dropout": draw(st.sampled_from([0.0, 0.25])),
        "bias": draw(st.sampled_from(["none", "none", "lora_only", "all"])),
        "rank_pattern": draw(st.dictionaries(st.sampled_from([*modules, r"layers\.1\..*", r".*\.0\..*"]), st.integers(1, 9), max_size=2)),
        "alpha_pattern": draw(st.dictionaries(st.sampled_from([*modules, "[a-z]*_proj"]), st.integers(1, 30), max_size=2)),
        "layers_to_transform": draw(st.sampled_from([None, None, [1], 0])),
        "fan_in_fan_out": architecture == "gpt2",
    }  # fmt: skip
    left = [name for name in ("norm", "lm_head", "ln_f", "embed_tokens") if name not in targets]
    config["modules_to_save"] = draw(st.sampled_from([None, None, left[:1], left]))
    return (
        architecture, config, draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from(["default", "sql", "a-b", "lora"])),
    )  # fmt: skip


@pytest.mark.matrix
@settings(max_examples=40, deadline=None, derandomize=True)
@given(configurations())
def test_any_adapter_of_peft_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, drawn: tuple[str, dict[str, Any], torch.dtype, str]
) -> None:
    architecture, config, dtype, name = drawn
    folder = tmp_path_factory.mktemp("drawn")
    build(architecture).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    try:
        model = peft_model(architecture, name, **config)
    except ValueError:
        return  # PEFT refuses the settings, or they match nothing
    for key, parameter in model.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder / "patch")
    patch = folder / "patch" / ("" if name == "default" else name)
    try:
        oracle = PeftModel.from_pretrained(build(architecture), patch).eval()  # PEFT's own reading of its file
    except RuntimeError:  # it sorts overlapping patterns when it saves, and then finds other ranks than it wrote
        with pytest.raises(PatchError, match="the config says rank"):
            read_patch(patch)
        return
    with torch.no_grad():
        expected = oracle(input_ids=IDS).logits

    ours = lorakit.load(folder / "base", {"x": patch}, dtype="float32")

    assert close(ours(IDS, adapters="x").logits, expected)
    rewritten = write_patch(folder / "rewritten", read_patch(patch))
    before, after = load_file(patch / "adapter_model.safetensors"), load_file(rewritten / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    with ours.merged("x") as merged:
        assert close(merged(IDS).logits, expected)
