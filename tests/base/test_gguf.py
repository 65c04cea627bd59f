"""GGUF files as bases and as exports: the weights, logits and tokens of llama.cpp's package and of transformers."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import lorakit
from lorakit.base import gguf
from lorakit.base.find import find_base
from lorakit.base.gguf import head_rows, rope_factors
from lorakit.base.gguf_tokenizer import SPLITTERS, read_tokenizer, write_tokenizer
from lorakit.base.quantized import quantized_weight
from lorakit.base.transformers_io import load_tokenizer
from lorakit.cli import main
from lorakit.errors import BaseModelError, LorakitError
from lorakit.export.gguf import export_gguf
from lorakit.ops._internals import gguf_formulas
from lorakit.patch import read_patch
from lorakit.quant.linear import dequantized_weight
from tests.helpers.gguf import rewrite, split_as
from tests.helpers.patches import make_patch
from tests.helpers.training import train

IDS = torch.arange(3, 35).reshape(2, 16)
FLOATS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
ONCE = ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "BF16")
KINDS = [
    kind if kind in ONCE else pytest.param(kind, marks=pytest.mark.matrix)
    for kind in (*gguf_formulas().GGML_NAME.values(), "F16", "BF16")
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., Path]:
    """Write a random model of a kind with a tokenizer that GGUF files can name."""

    def write(kind: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        words = split_as(tokenizer, "qwen2" if kind.startswith("qwen") else "llama-bpe")
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            kind, **FLOATS | {"vocab_size": len(words) + 5, "eos_token_id": words.eos_token_id} | changes
        )
        model = AutoModelForCausalLM.from_config(config)
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.data.normal_(1.0, 0.2)
        model.save_pretrained(folder)
        words.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="module")
def llama(make: Callable[..., Path]) -> Path:
    return make("llama")


@pytest.fixture(scope="module")
def file(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in blocks of 8 bits."""
    out = tmp_path_factory.mktemp("gguf") / "out"
    return rewrite(export_gguf(llama, llama, {}, out), out / "model.Q8_0.gguf", kind="Q8_0")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("llama", {}, marks=pytest.mark.matrix),
        pytest.param("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, marks=pytest.mark.matrix),
        ("qwen2", {}),
        ("llama", {"rope_parameters": LLAMA31, "rms_norm_eps": 1e-5}),
        pytest.param("qwen3", {"head_dim": 32}, marks=pytest.mark.matrix),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True}),
    ],
)  # fmt: skip
def test_a_model_comes_back_from_its_gguf_with_every_bit(
    make: Callable[..., Path], tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    base = make(kind, **changes)

    file = export_gguf(base, base, {}, tmp_path / "out")

    own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    back = AutoModelForCausalLM.from_pretrained(find_base(str(file)), dtype=torch.float32)
    weights = own.state_dict()
    assert back.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.state_dict().items())
    assert torch.equal(logits(back), logits(own))
    if "head_dim" not in changes and changes.get("rope_parameters") != LLAMA31:  # which transformers' own reader loses
        theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        torch.testing.assert_close(logits(theirs), logits(own), rtol=1e-5, atol=1e-5)
    words, expected = (AutoTokenizer.from_pretrained(folder) for folder in (find_base(str(file)), base))
    assert words.chat_template == expected.chat_template
    assert words.eos_token == expected.eos_token


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_values_of_llama_cpps_package(file: Path, tmp_path: Path, kind: str) -> None:
    written = rewrite(file, tmp_path / "model.gguf", kind=kind)
    model: Any = lorakit.load(written, dtype="float32").model

    stored = {tensor.name: tensor for tensor in GGUFReader(str(written)).tensors}
    config = AutoConfig.from_pretrained(find_base(str(written))).to_dict()
    for leaf, module in {"ffn_down": "mlp.down_proj", "attn_k": "self_attn.k_proj"}.items():
        layer = model.get_submodule(f"model.layers.1.{module}")
        tensor = stored[f"blk.1.{leaf}.weight"]
        rows = head_rows(module, config)
        W = dequantize(tensor.data, tensor.tensor_type)
        weight = dequantized_weight(layer) if kind not in ("F16", "BF16") else layer.weight
        assert np.array_equal(weight.detach().numpy()[slice(None) if rows is None else rows], W)
        assert (quantized_weight(layer) is not None) == (kind not in ("F16", "BF16"))


def test_a_run_on_a_gguf_trains_answers_merges_and_plans(
    recipe: Callable[..., Path], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(base={"model": str(file)}, output=str(tmp_path / "patch"))

    assert main(["check", str(path)]) == 0
    assert main(["plan", str(path)]) == 0
    assert len(re.findall(r"^quantised +gguf, 14 linear layers$", capsys.readouterr().out, re.MULTILINE)) == 2
    train(path)
    model = lorakit.load(file, {"a": tmp_path / "patch"}, dtype="float32")
    answers = model.generate(["hello"], "a", max_new_tokens=8)
    with model.using("a"), torch.no_grad():
        expected = model(IDS).logits
    merged = lorakit.merge(file, tmp_path / "patch", out=tmp_path / "merged", dtype="float32")

    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4
    )
    assert lorakit.load(merged, dtype="float32").generate(["hello"], max_new_tokens=8) == answers
    out = tmp_path / "adapter"
    assert main(["export", str(file), "--adapter", f"a={tmp_path / 'patch'}", "--gguf", "--out", str(out)]) == 0
    assert [one.name for one in out.iterdir()] == ["a.gguf"]  # the base is a GGUF already
    assert f"-m {file} --lora {out / 'a.gguf'}" in capsys.readouterr().out


def test_an_adapters_gguf_changes_the_base_as_the_adapter_does(llama: Path, tmp_path: Path) -> None:
    patch = read_patch(make_patch(llama, tmp_path / "two"))

    file = export_gguf(llama, llama, {"one": patch}, tmp_path / "out")

    reader = GGUFReader(str(file.with_name("one.gguf")))
    tensors = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"].contents()
    base = {one.name: torch.from_numpy(np.array(one.data)) for one in GGUFReader(str(file)).tensors}
    merged = lorakit.merge(llama, tmp_path / "two", out=tmp_path / "merged")
    expected = GGUFReader(str(export_gguf(merged, merged, {}, tmp_path / "whole")))
    for tensor in expected.tensors:
        W = base[tensor.name]
        if f"{tensor.name}.lora_a" in tensors:
            A, B = (tensors[f"{tensor.name}.lora_{part}"] for part in "ab")
            W = W + alpha / len(A) * B @ A
        torch.testing.assert_close(torch.from_numpy(np.array(tensor.data)), W, rtol=1e-5, atol=1e-6)
    assert len(tensors) == 2 * len(patch.layers)


@pytest.mark.parametrize(
    "name", [name if name == "llama-bpe" else pytest.param(name, marks=pytest.mark.matrix) for name in SPLITTERS]
)
@given(text=st.text(max_size=40) | st.text("ab 01.,'\n\t\u00e9e\u0301\u4e2dA", max_size=40))
@settings(max_examples=40, deadline=None)
def test_a_tokenizer_comes_back_with_the_same_tokens(tokenizer: Any, name: str, text: str) -> None:
    own = split_as(tokenizer, name)
    back = read_tokenizer(write_tokenizer(own, len(own) + 3))
    assert back.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False)
    special = f"{own.eos_token}{text}"
    assert back(special).input_ids[-len(own(special).input_ids) :] == own(special).input_ids


def test_a_tokenizer_is_known_whatever_its_offsets_and_refused_for_what_a_gguf_cannot_say(tokenizer: Any) -> None:
    def changed(**changes: Any) -> Any:
        text = json.loads(split_as(tokenizer, "llama-bpe").backend_tokenizer.to_str())
        text["pre_tokenizer"]["pretokenizers"][-1]["trim_offsets"] = False  # as Qwen's has it
        text["added_tokens"][0] |= changes
        own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(text)))
        own.bos_token = tokenizer.bos_token
        return own

    assert write_tokenizer(changed(), len(tokenizer))["tokenizer.ggml.pre"] == "llama-bpe"
    ending, templates = changed(), changed()
    text = json.loads(changed().backend_tokenizer.to_str())
    text["model"] |= {"merges": []}
    alone = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(text)))
    alone.bos_token = tokenizer.bos_token
    templates.chat_template = {"default": "", "tool_use": ""}
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single=["$A", tokenizer.eos_token], special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)]
    )
    spaces = "take the spaces"
    refused = [(changed(lstrip=True), spaces), (changed(rstrip=True), spaces), (changed(single_word=True), spaces)]
    refused += [(ending, "texts get an end"), (templates, "several chat templates"), (alone, "no merges")]
    for own, why in refused:
        with pytest.raises(BaseModelError, match=why):
            write_tokenizer(own, len(tokenizer))
    with pytest.raises(BaseModelError, match="more tokens than the embedding has rows"):
        write_tokenizer(changed(), len(tokenizer) - 1)


def test_a_sentencepiece_vocabulary_is_read_as_transformers_reads_it() -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "ab",
        "\u2581ab",
    ]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -1.0, -2.0, -0.5]
    own = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    words = read_tokenizer(own)
    assert words.convert_ids_to_tokens(words("ab a").input_ids) == ["<s>", "\u2581ab", "\u2581a"]
    assert words.convert_ids_to_tokens(words.encode(" \u00e9", add_special_tokens=False)) == [
        "\u2581", "\u2581", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert words.decode(words.encode("ab a\u00e9", add_special_tokens=False)) == "ab a\u00e9"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "gemma3"}, "a gemma3; lorakit reads GGUF files of llama, qwen2, qwen3"),
        ({"llama__rope__scaling__type": "yarn"}, "setting llama.rope.scaling.type: not known"),
        ({"llama__rope__dimension_count": 32}, "llama.rope.dimension_count: another than"),
        ({"general__alignment": 0}, "not a complete GGUF file: ZeroDivisionError"),
        ({"split__count": 3}, "one of several parts; join them first"),
        ({"llama__block_count": None}, "not a complete GGUF file"),
        ({"llama__block_count": 1}, "tensor model.layers.1"),
    ],
)
def test_what_is_not_known_of_a_file_is_refused_by_name(
    file: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    written = rewrite(file, tmp_path / "other.gguf", **changes)
    with pytest.raises(BaseModelError, match=words):
        lorakit.load(written)
    assert not list(Path(find_base(str(file))).parent.glob("other-*"))


def test_an_unknown_way_to_split_text_needs_another_tokenizer(file: Path, llama: Path, tmp_path: Path) -> None:
    written = rewrite(file, tmp_path / "model.gguf", tokenizer__ggml__pre="of-tomorrow")
    with pytest.raises(BaseModelError, match=r"has no tokenizer \(tokenizer gpt2 with pre-tokenizer of-tomorrow"):
        load_tokenizer(find_base(str(written)))
    own, known = (lorakit.load(path, tokenizer=words) for path, words in ((written, llama), (file, None)))
    assert own.generate(["hello"], max_new_tokens=4) == known.generate(["hello"], max_new_tokens=4)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_down.bias",
        "blk.0.attn_k.bias",
        "blk.1.attn_q_norm.weight",
        "output_norm.bias",
        "blk.0.ffn_down.scale",
    ],
)
def test_a_tensor_that_the_model_has_not_is_refused_by_name(file: Path, tmp_path: Path, name: str) -> None:
    written = rewrite(file, tmp_path / "model.gguf", tensors={name: np.ones(256, np.float32)})
    with pytest.raises(BaseModelError, match="tensor model"):
        find_base(str(written))


def test_a_file_that_changes_while_it_is_read_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = rewrite(file, tmp_path / "changing.gguf")

    def touched(settings: Any) -> Any:
        written.write_bytes(written.read_bytes())
        return read_tokenizer(settings)

    monkeypatch.setattr(gguf, "read_tokenizer", touched)  # as another program would, between two reads
    with pytest.raises(BaseModelError, match="changed while it was read"):
        find_base(str(written))
    assert not list(find_base(str(file)).parent.glob("*changing-*"))


def test_a_cache_that_cannot_be_written_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lorakit").mkdir()
    (tmp_path / "lorakit" / "gguf").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BaseModelError, match="gguf/model.Q8_0-.*: cannot be written"):
        find_base(str(file))


def test_a_piece_that_merges_lack_is_a_damaged_file(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="not a complete GGUF file"):
        find_base(str(rewrite(file, tmp_path / "model.gguf", tokenizer__ggml__merges=["zzzz yyyy"])))


def test_an_unused_token_that_is_named_keeps_its_id(file: Path, tmp_path: Path) -> None:
    last = len(GGUFReader(str(file)).fields["tokenizer.ggml.tokens"].data) - 1  # of a row without a token
    words = load_tokenizer(find_base(str(rewrite(file, tmp_path / "m.gguf", tokenizer__ggml__padding_token_id=last))))
    assert words.pad_token_id == last


def test_end_tokens_go_out_and_come_back(llama: Path, tmp_path: Path) -> None:
    file = export_gguf(llama, llama, {}, tmp_path / "out", [load_tokenizer(llama).eos_token_id, 7, 9])
    eos = load_tokenizer(llama).eos_token_id
    ends = json.loads((find_base(str(file)) / "generation_config.json").read_text())["eos_token_id"]
    assert (ends[0], set(ends)) == (eos, {eos, 7, 9})


def test_what_llama_cpp_does_not_compute_is_not_exported(
    make: Callable[..., Path], llama: Path, tmp_path: Path
) -> None:
    tied = make("llama", tie_word_embeddings=True)
    for number, (base, targets, words) in enumerate(
        [
            (llama, {"targets": ["embed_tokens", "q_proj"]}, "takes no adapter of model.embed_tokens"),
            (llama, {"targets": ["q_proj"], "modules_to_save": ["input_layernorm"]}, "whole tensors such as"),
        ]
    ):
        patch = read_patch(make_patch(base, tmp_path / f"patch{number}", **targets))
        with pytest.raises(LorakitError, match=words):
            export_gguf(base, base, {"one": patch}, tmp_path / "out", [])
    weights = load_file(tied / "model.safetensors")
    for dtype, words in ((torch.float64, "tensors in torch.float64"), (None, "tensor model.norm.weight: missing")):
        changed = dict(weights)
        norm = changed.pop("model.norm.weight")
        changed |= {} if dtype is None else {"model.norm.weight": norm.to(dtype)}
        save_file(changed, tied / "model.safetensors", {"format": "pt"})
        with pytest.raises(BaseModelError, match=words):
            export_gguf(tied, tied, {}, tmp_path / "out", [])


def test_a_frequency_is_written_as_llama_cpp_reads_it(make: Callable[..., Path], tmp_path: Path) -> None:
    base = make("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1000000})
    fields = GGUFReader(str(export_gguf(base, base, {}, tmp_path / "out"))).fields
    assert fields["qwen3.rope.freq_base"].types[0].name == "FLOAT32"


@pytest.mark.parametrize("size", [0, 3, 100, 0.5, -1])
def test_a_cut_file_is_refused_and_leaves_nothing(file: Path, tmp_path: Path, size: float) -> None:
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(size * len(content)) if isinstance(size, float) else size])
    with pytest.raises(BaseModelError, match=r"cut.gguf: not a complete GGUF file"):
        find_base(str(cut))
    assert not list(find_base(str(file)).parent.glob("*cut-*"))


def test_a_count_that_the_file_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    for kind in (4, 8):  # numbers, texts
        settings = text("general.architecture") + struct.pack("<I", 8) + text("llama")
        settings += text("own.numbers") + struct.pack("<IIQ", 9, kind, 2**60)
        (tmp_path / "many.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + settings + bytes(64))
        with pytest.raises(BaseModelError, match=r"many.gguf: not a complete GGUF file"):
            find_base(str(tmp_path / "many.gguf"))


def test_a_type_that_is_not_known_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="ggml type 6, which is not supported"):
        find_base(str(rewrite(file, tmp_path / "model.gguf", kind="Q5_0")))


def test_a_file_is_read_once_and_again_after_it_has_changed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = rewrite(file, tmp_path / "own.gguf")
    first = find_base(str(own))
    assert "once" in capsys.readouterr().err
    assert (find_base(str(own)), capsys.readouterr().err) == (first, "")
    rewrite(file, own, kind="Q4_0")
    assert find_base(str(own)) != first


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"rope_parameters": LLAMA31 | {"low_freq_factor": 2.0}}, "frequencies that are not Llama 3's"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters is"),
        ("mistral", {"sliding_window": 32}, "a mistral; lorakit writes GGUF files of llama, qwen2, qwen3"),
    ],
)
def test_what_a_gguf_cannot_say_is_not_exported(
    make: Callable[..., Path], tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    base = make(kind, **changes)
    with pytest.raises(BaseModelError, match=words):
        export_gguf(base, base, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_split_of_text_is_not_exported(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(base), "--gguf", "--out", str(tmp_path / "out")]) == 2
    assert "its tokenizer splits text in another way than gpt-2, smollm" in capsys.readouterr().err


def test_factors_of_frequencies_are_transformers_own() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model("llama", **FLOATS, head_dim=128, rope_parameters=LLAMA31)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(rope_factors(LLAMA31, 128), plain / frequencies, rtol=1e-5)
