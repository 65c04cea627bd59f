"""A choice of architectures: the default recipe trains them, and transformers and PEFT compute the same with the patch.

`make zoo` tries all that transformers has, and writes docs/bases.md.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import lorakit
from lorakit.base.transformers_io import load_tokenizer
from lorakit.decoding.sampling import SamplingSettings
from lorakit.patch.prompting import chat_template_digest, prompt_digest
from lorakit.serving.engine import ServingEngine
from scripts.zoo.trial import COMPARISONS, small_config, try_architecture
from tests.helpers.patches import make_patch

CHOSEN = {  # architecture -> a part of what its run says
    "deepseek_v3": "targets",  # dense layers and shared experts with the names of experts
    "falcon": "targets    8 of 9",  # linear layers of a class of its own
    "nemotron_h": "packing    row by row in NemotronHMamba2Mixer",  # tensors with other names in the files, and states
    "phimoe": "a PhimoeTopKRouter",  # a router that is no linear layer, and reads its jitter in evaluation
    "gemma3": "outside of the text model",  # a tower
    "mistral3": "outside of the text model",  # a class for images and texts, and none for texts alone
    "qwen2_5_vl": "outside of the text model",  # positions in three dimensions
    "qwen3_vl_moe": "outside of the text model",  # the config around the text model's says that the head is not tied
    "mamba2": "packing    row by row in Mamba2Mixer",
    "rembert": "targets",  # a head that takes another width than the hidden states
    "doge": "packing    rows are kept apart by a mask",  # computes with its mask
    "llama4_text": "a Llama4Router",  # a class with a head that names itself as its base model
    "roberta": "targets",  # positions from two on
    "longcat_flash": "its weight is read past the layer",  # a router's
    "deepseek_v4": "further away than most rows are long",  # layers that read a hundred tokens at once
    "zamba": "another layer has the same weight",
    "mistral_large4": "outside of the text model",  # files with the names of another program, for both models
}
ONCE = ("deepseek_v3", "falcon", "nemotron_h", "gemma3", "llama4_text")
NOT_IN_PEFT = ("deepseek_v3", "longcat_flash", "mistral_large4")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in ONCE else pytest.param(name, marks=pytest.mark.matrix) for name in CHOSEN]
)
def test_the_default_recipe_trains_an_architecture_exactly(name: str, tokenizer: Any, tmp_path: Path) -> None:
    outcome = try_architecture(name, tokenizer, tmp_path)
    assert (outcome.state, outcome.why) == ("trained", "")
    assert outcome.differences.keys() == COMPARISONS.keys()
    assert any(CHOSEN[name] in line for line in outcome.lines), outcome.lines
    assert bool(outcome.peft) == (name in NOT_IN_PEFT)
    assert ("PEFT computes something else" in (tmp_path / "run/README.md").read_text()) == bool(outcome.peft)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "qwen3_5",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("qwen3_5_moe", "qwen3_vl", "llava")),
    ],
)
def test_the_text_side_of_a_base_with_vision_is_adapted_and_merged_as_it_is_published(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    """The files are of the class with vision, whose text model may be renamed by rules of its own."""
    tokens = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    published = AutoModelForImageTextToText.from_config(small_config(name, len(tokenizer), tokens)).eval()
    published.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    ids = torch.arange(5, 29).reshape(2, 12)
    with torch.no_grad():
        expected = published(input_ids=ids).logits

    patch = make_patch(tmp_path / "base", tmp_path / "patch")
    model = lorakit.load(tmp_path / "base", {"x": patch}, dtype="float32")
    merged = lorakit.merge(tmp_path / "base", patch, out=tmp_path / "merged", verify=True)
    full = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()

    torch.testing.assert_close(model(ids).logits, expected)
    with contextlib.closing(ServingEngine(model, max_rows=2)) as engine:
        settings = SamplingSettings(max_tokens=4, min_tokens=4)
        answers = [engine.submit([5, 6, 7 + row], name, settings) for row, name in enumerate(["x", None, "x"])]
        for row, (answer, adapter) in enumerate(zip(answers, ["x", None, "x"], strict=True)):
            tokens = [5, 6, 7 + row]
            for token in answer.ids():
                assert int(model(torch.tensor([tokens]), adapters=adapter).logits[0, -1].argmax()) == token
                tokens.append(token)
    adapted = model(ids, adapters="x").logits
    assert not torch.allclose(adapted, expected, atol=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(full(input_ids=ids).logits, adapted, rtol=1e-3, atol=1e-4)


def test_a_chat_template_beside_the_tokenizers_files_is_used_and_named(tokenizer: Any, tmp_path: Path) -> None:
    """As bases that see images have it, for their processor."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    none = chat_template_digest(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}!"}))

    loaded = load_tokenizer(tmp_path)

    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert none is None
    assert chat_template_digest(tmp_path) == prompt_digest(loaded.chat_template)
