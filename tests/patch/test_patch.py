"""A patch means the same everywhere, or it is refused; it is complete, or it is not there."""

import errno
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaForSequenceClassification

import lorakit
from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_base, load_skeleton
from lorakit.errors import BaseModelError, LorakitError, PatchError, TemporaryFailure
from lorakit.files.base_files import open_base_files
from lorakit.files.safetensors import open_tensors
from lorakit.inspection.show import show
from lorakit.lora import adapter_tensors, inject
from lorakit.patch import (
    BaseIdentity,
    BaseShapes,
    check_base,
    check_fits,
    fingerprint,
    open_patch,
    read_patch,
    save_patch,
    write_patch,
)
from lorakit.patch.compatibility import Program, compatible_programs
from lorakit.patch.patch import is_finite
from tests.helpers.bases import make_base
from tests.helpers.patches import make_patch

CPU = torch.device("cpu")

TENSORS = "adapter_model.safetensors"


def adapted(base: Path, **options: Any) -> Any:
    model = inject(load_base(base, torch.float32, CPU), rank=4, alpha=6, **options)
    torch.manual_seed(0)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.1)
    return model


@pytest.fixture
def patch(base: Path, tmp_path: Path) -> Path:
    return save_patch(adapted(base), tmp_path / "patch")


def edit(folder: Path, **changes: Any) -> Path:
    """The patch with keys of its config changed."""
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def test_what_was_saved_is_what_is_read(base: Path, patch: Path) -> None:
    saved = adapter_tensors(adapted(base))
    read = read_patch(patch)

    assert len(read.layers) == 14
    for module, layer in read.layers.items():
        assert (layer.rank, layer.alpha, layer.scale) == (4, 6, 1.5)
        for name, tensor in layer.tensors.items():
            assert torch.equal(tensor, saved[f"{module}.{name}"])


def test_the_same_adapter_gives_the_same_bytes_that_other_programs_read(
    base: Path, patch: Path, tmp_path: Path
) -> None:
    second = save_patch(adapted(base), tmp_path / "second")

    assert (second / TENSORS).read_bytes() == (patch / TENSORS).read_bytes()
    theirs = load_file(patch / TENSORS)
    assert theirs.keys() == open_tensors(patch / TENSORS).entries.keys()
    assert (patch / TENSORS).stat().st_mode & 0o777 == (patch / "adapter_config.json").stat().st_mode & 0o777 == 0o644


def test_the_repr_of_a_patch_is_one_line_without_tensors(base: Path, patch: Path) -> None:
    shown = repr(read_patch(patch))
    assert re.fullmatch(rf"Patch\('{patch}': lora, rank \d+, \d+ layers, [\d,]+ parameters, for {base}\)", shown)
    assert "tensor" not in repr(next(iter(read_patch(patch).layers.values())))


def test_programs_for_language_models_are_said_to_read_patches_of_those_alone(base: Path, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    save_patch(inject(network, rank=2), tmp_path / "network")
    make_patch(base, tmp_path / "head", targets=["lm_head"])
    for name, problem in (("network", "its layers (1, 3) are not those of a language model"), ("head", "")):
        peft, *others = compatible_programs(read_patch(tmp_path / name))
        assert peft.problems == ()
        assert [program.problems for program in others] == [(problem,) if problem else ()] * 2, name


def test_vllm_reads_patterns_of_rank_and_alpha_and_one_head_of_a_classifier(base: Path, tmp_path: Path) -> None:
    def vllm(folder: Path) -> Program:
        return next(program for program in compatible_programs(read_patch(folder)) if program.name == "vLLM")

    settings: dict[str, Any] = {"rank_pattern": {"up_proj": 6}, "alpha_pattern": {"q_proj": 2.0}}
    uneven = make_patch(base, tmp_path / "uneven", rank=16, targets=["q_proj", "up_proj"], **settings)
    assert vllm(uneven) == Program("vLLM", (), "--enable-lora --max-lora-rank 16 (0.32 or newer)")
    # vLLM counts every rank of the config, whether a layer has it or not
    (uneven / "lorakit.json").unlink()
    edit(uneven, rank_pattern={**read_patch(uneven).config.rank_pattern, "absent": 60})
    assert vllm(uneven).call.startswith("--enable-lora --max-lora-rank 64")

    config = AutoConfig.from_pretrained(base, num_labels=3, pad_token_id=0)
    for heads, problems in (
        (["score"], ()),
        (["model.norm"], ("modules_to_save other than one head of a classifier (score, classifier)",)),
    ):
        classifier = LlamaForSequenceClassification(config)
        folder = tmp_path / heads[0]
        save_patch(inject(classifier, rank=2, targets=["q_proj"], modules_to_save=heads), folder)
        assert vllm(folder).problems == problems
    only_head = save_patch(
        inject(LlamaForSequenceClassification(config), targets=[], modules_to_save=["score"]), tmp_path / "only"
    )
    assert vllm(only_head).problems == ("no low-rank update",)


def test_a_patch_that_does_not_fit_counts_its_parts_and_those_that_it_lacks(
    base: Path, tmp_path: Path, tokenizer: Any
) -> None:
    other = make_base(tmp_path / "other", tokenizer, num_hidden_layers=3)
    patch = make_patch(base, tmp_path / "small", targets=["q_proj"])
    config = json.loads((patch / "adapter_config.json").read_text()) | {
        "target_modules": ["q_proj", "up_proj", "v_proj"]
    }
    (patch / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(PatchError, match=r"does not fit .* \(LlamaForCausalLM\): 7 that it lacks\n"):
        lorakit.merge(other, patch, out=tmp_path / "merged", allow={"base"})

    wide = make_base(tmp_path / "wide", tokenizer, num_hidden_layers=3, hidden_size=64)
    said: list[str] = []
    with pytest.raises(PatchError, match=r"\(LlamaForCausalLM\): 2 of its 2 parts, 7 that it lacks\n"):
        show(str(patch), str(wide), said.append)
    rows = [line.split()[0] for line in said if line.startswith("model.")]
    assert rows == ["model.layers.{0-1}.self_attn.q_proj"]


def test_a_patch_is_not_overwritten_unless_asked(base: Path, patch: Path) -> None:
    with pytest.raises(PatchError, match="holds a patch already"):
        save_patch(adapted(base), patch)
    save_patch(adapted(base), patch, overwrite=True)


def test_a_value_that_is_not_finite_is_never_saved(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    next(iter(adapter_tensors(model).values())).data[0, 0] = float("nan")

    with pytest.raises(PatchError, match=r"q_proj.lora_A holds values that are not finite; nothing was saved"):
        save_patch(model, tmp_path / "patch")
    assert not (tmp_path / "patch").exists()
    with pytest.raises(PatchError, match="has no adapter"):
        save_patch(load_base(base, torch.float32, CPU), tmp_path / "patch")


def test_a_value_that_stopped_being_finite_after_reading_is_not_written(patch: Path, tmp_path: Path) -> None:
    loaded = read_patch(patch)
    next(iter(next(iter(loaded.layers.values())).tensors.values())).view(-1)[0] = float("inf")

    with pytest.raises(PatchError, match=r"lora_A.weight holds values that are not finite; nothing was saved"):
        write_patch(tmp_path / "rewritten", loaded)
    assert not (tmp_path / "rewritten").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_dora": True},
            "use_dora is True, use_rslora is False in the config, and lora_magnitude_vector is missing",
        ),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"some_future_key": 3}, "some_future_key: 3"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4'"),
        ({"bias": "some"}, "bias must be one of none, all, lora_only, got 'some'"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names, got 'lm_head'"),
        (
            {"lora_bias": True},
            "lora_bias is True in the config, and model.layers.0.mlp.down_proj.lora_B.bias is missing",
        ),
        ({"lora_bias": True, "bias": "all"}, "lora_bias: True"),
        ({"lora_bias": True, "use_dora": True}, "lora_bias: True"),
        ({"kasa_config": {"beta": 1e-4, "gamma": 1e-3}}, "kasa_config: {'beta': 0.0001"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: {'nblocks': 2}"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices names tokens, and their rows are not there"),
        ({"trainable_token_indices": {"a": [-1]}}, "must be lists of token ids"),
        (
            {"target_parameters": ["mlp.experts.up"]},
            "target_parameters names experts, and no tensors of theirs are there",
        ),
        ({"target_parameters": "experts"}, "target_parameters must be a list of names"),
        ({"use_dora": 1}, "use_dora must be bool, got 1"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_rslora": "false"}, "use_rslora must be bool, got 'false'"),
        ({"some_future_key": 0}, "some_future_key: 0"),
        ({"rank_pattern": [1]}, "rank_pattern must be a mapping, got [1]"),
        ({"rank_pattern": {"q(": 8}}, "'q(' is not a regular expression"),
        (
            {"lora_alpha": "16", "alpha_pattern": {"lora_alpha": 1}},
            "lora_alpha must be a number from 1e-9 to 1e9, got '16'",
        ),
        ({"lora_dropout": "a"}, "lora_dropout must be int or float, got 'a'"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path must be a text that can be printed, got 5"),
        (
            {"base_model_name_or_path": "a\nb"},
            "base_model_name_or_path must be a text that can be printed, got 'a\\nb'",
        ),
        ({"bad\x1b[31m\nkey": 1}, r"'bad\x1b[31m\nkey': 1"),
        ({"r": True}, "r must be a whole number from 1 to 1e9, got True"),
        ({"lora_alpha": 1e-320}, "lora_alpha must be a number from 1e-9 to 1e9, got 1e-320"),
        ({"lora_alpha": -1}, "lora_alpha must be a number from 1e-9 to 1e9, got -1"),
        ({"r": 8}, "the config says rank 8, but A is (4, 48)"),
    ],
)
def test_a_setting_that_would_mean_something_else_is_refused_by_name(
    patch: Path, changes: dict[str, Any], message: str
) -> None:
    edited = edit(patch, **changes)
    (edited / "lorakit.json").unlink(missing_ok=True)
    with pytest.raises(PatchError) as caught:
        read_patch(edited)
    assert message in str(caught.value)


def test_a_whole_module_that_is_missing_is_noticed_when_the_base_has_it(base: Path, patch: Path) -> None:
    shapes = BaseShapes.of(load_skeleton(base))

    check_fits(read_patch(edit(patch, modules_to_save=["classifier", "score"])), shapes, base)  # PEFT adds these
    with pytest.raises(PatchError, match=r"lm_head.weight belongs to modules_to_save \('lm_head'\), and the patch"):
        check_fits(read_patch(edit(patch, modules_to_save=["lm_head"])), shapes, base)


def test_a_name_that_ends_another_keeps_its_own_rank_and_alpha(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "block": Block(), "other": Block()})
    inject(
        model,
        rank=2,
        alpha=4,
        targets=["fc"],
        alpha_pattern={"block.fc": 16, "other.fc": 16},
        rank_pattern={"other.fc": 3},
    )

    read = read_patch(save_patch(model, tmp_path / "patch"))

    assert {name: (layer.rank, layer.alpha) for name, layer in read.layers.items()} == {
        "fc": (2, 4), "block.fc": (2, 16), "other.fc": (3, 16),
    }  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    ["[", "3", '{"base": "x"}', '{"base": {"scheme": 1}}', '{"data": []}', '{"results": {"a": "x"}}', "[" * 9999],
)
def test_damaged_facts_are_refused(patch: Path, facts: str) -> None:
    tensors = load_file(patch / TENSORS)
    save_file(tensors, patch / TENSORS, metadata={"format": "pt", "lorakit": facts})
    (patch / "lorakit.json").unlink()

    with pytest.raises(PatchError, match="facts in the metadata are damaged"):
        read_patch(patch)


def test_a_full_disk_keeps_the_old_patch(base: Path, patch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in patch.iterdir()}
    fsync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TemporaryFailure, match="the disk is full"):
        save_patch(adapted(base, dropout=0.5), patch, overwrite=True)

    assert {path.name: path.read_bytes() for path in patch.iterdir()} == before


def test_a_readme_of_others_is_not_replaced(base: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(PatchError, match=r"holds a README.md"):
        save_patch(adapted(base), tmp_path)


def test_a_patch_made_on_a_rounded_base_fits_the_base_it_was_rounded_from(base: Path, tmp_path: Path) -> None:
    model = inject(load_base(base, torch.bfloat16, CPU), rank=2)
    read = read_patch(save_patch(model, tmp_path / "patch"))

    check_base(read, base)


def test_a_base_that_holds_an_adapter_is_refused(base: Path, patch: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "both")
    shutil.copy(patch / "adapter_config.json", folder)
    with pytest.raises(BaseModelError, match="holds an adapter beside the model"):
        find_base(str(folder))


def test_harmless_settings_of_other_programs_are_accepted(patch: Path) -> None:
    read_patch(edit(patch, peft_version="0.99", eva_config=None, auto_mapping={"x": 1}, init_lora_weights="gaussian"))


def rewrite(folder: Path, change: Any) -> Path:
    """The patch with other tensors, as a program that knows nothing of lorakit would write it."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    (folder / "lorakit.json").unlink()
    return folder


def test_missing_extra_misshaped_and_non_finite_tensors_are_named(patch: Path, tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    cases = {
        "q_proj.lora_A is missing": lambda t: t.pop(key),
        "x.lora_A is missing": lambda t: t.update({"base_model.model.x.lora_magnitude_vector": torch.ones(2)}),
        "a tensor lorakit does not know": lambda t: t.update({"base_model.model.x.lora_C.weight": torch.ones(2)}),
        "not a matrix": lambda t: t.update({key: torch.ones(4)}),
        "not finite": lambda t: t[key].fill_(float("inf")),
        "holds no tensors": lambda t: t.clear(),
        "the config says rank 4": lambda t: t.update({key: torch.ones(3, 32)}),
    }
    for message, change in cases.items():
        copy = rewrite(shutil.copytree(patch, tmp_path / message.replace(" ", "_")), change)
        with pytest.raises(PatchError, match=message):
            read_patch(copy)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("read.MAX_RANK", 3, "down_proj: rank 4, 3 is allowed"),
        ("read.MAX_PATCH_BYTES", 1000, "bytes, and 1,000 are allowed"),
        ("read.MAX_PATCH_HEADER_BYTES", 600, "a header of .* bytes, and 600 are allowed"),
        ("adapter_config.MAX_CONFIG_BYTES", 100, "adapter_config.json: .* bytes, 100 are allowed"),
    ],
)
def test_a_patch_that_asks_for_too_much_is_refused_before_it_is_read(
    base: Path, patch: Path, limit: str, value: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lorakit.load(base, dtype="float32")

    def never(*arguments: Any) -> None:
        raise AssertionError("tensors were read")

    monkeypatch.setattr("lorakit.files.safetensors.SafetensorsFile.read_elements", never)
    monkeypatch.setattr(f"lorakit.patch.{limit}", value)
    for read in (read_patch, open_patch, lambda folder: model.load_adapter("x", folder)):
        with pytest.raises(PatchError, match=message):
            read(patch)


def test_every_cut_of_a_patch_without_digest_is_noticed(patch: Path) -> None:
    (patch / "lorakit.json").unlink()
    content = (patch / TENSORS).read_bytes()
    for changed in (
        *(content[:length] for length in range(0, len(content), len(content) // 60)),
        content[:-1],
        content + b"x",
    ):
        (patch / TENSORS).write_bytes(changed)
        with pytest.raises(PatchError):
            read_patch(patch)


def test_every_flipped_byte_and_every_cut_is_noticed(patch: Path) -> None:
    content = (patch / TENSORS).read_bytes()
    for position in range(0, len(content), len(content) // 60):
        for damaged in (
            content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :],
            content[:position],
        ):
            (patch / TENSORS).write_bytes(damaged)
            with pytest.raises(PatchError):
                read_patch(patch)


def test_a_patch_knows_its_base(base: Path, patch: Path, tmp_path: Path, tokenizer: Any) -> None:
    read = read_patch(patch)

    def judge(folder: Path) -> None:
        check_base(read, folder)

    judge(base)
    resharded = tmp_path / "resharded"
    load_base(base, torch.float32, CPU).save_pretrained(resharded, max_shard_size="20KB")
    assert len(list(resharded.glob("*.safetensors"))) > 2
    judge(resharded)

    other = shutil.copytree(base, tmp_path / "other")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PatchError, match=r"1 of 14 adapted weights \(model.layers.1.mlp.up_proj first\) differ"):
        judge(other)
    with pytest.raises(PatchError, match="14 of 14 adapted weights"):
        judge(make_base(tmp_path / "seed", tokenizer, seed=1))


def test_config_and_tokenizer_are_part_of_a_trained_patchs_base(base: Path, patch: Path, tmp_path: Path) -> None:
    names = list(read_patch(patch).layers)
    recorded = fingerprint(BaseIdentity(open_base_files(base)), names)
    for file, change in (("config.json", ("rope_theta", 5.0)), ("tokenizer.json", ("version", "x"))):
        other = shutil.copytree(base, tmp_path / file)
        content = json.loads((other / file).read_text())
        (other / file).write_text(json.dumps(content | {change[0]: change[1]}))
        keys = r" \(rope_theta: absent in training, 5.0 here\)" if file == "config.json" else ""
        with pytest.raises(PatchError, match=f"another base.*: {file.partition('.')[0]}{keys} differ"):
            check_base(replace(read_patch(patch), metadata={"base": recorded}), other)


def test_a_base_with_missing_weights_is_refused(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(LorakitError, match=r"missing or of another shape.*model.layers.1.mlp.up_proj.weight"):
        load_base(folder, torch.float32, CPU)


def test_what_is_not_finite_is_found_whatever_is_beside_it() -> None:
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert is_finite(largest)  # though their sum is not
    assert is_finite(torch.zeros(0))
    for value in (math.inf, -math.inf, math.nan):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            tensor = torch.randn(1000).to(dtype)
            assert is_finite(tensor)
            tensor[77] = value
            assert not is_finite(tensor)
    assert not is_finite(torch.tensor([math.inf, -math.inf]))


def test_pickles_and_missing_folders_are_refused(tmp_path: Path, patch: Path) -> None:
    (patch / TENSORS).rename(patch / "adapter_model.bin")
    with pytest.raises(PatchError, match="a pickle, which can run code"):
        read_patch(patch)
    with pytest.raises(PatchError, match="absent: no such folder"):
        read_patch(tmp_path / "absent")
    (tmp_path / f"{patch.name}s").mkdir()  # no patch, so it is not proposed
    with pytest.raises(PatchError, match=rf"no such folder; .* Nearest: '{patch}'\.$"):
        read_patch(tmp_path / f"{patch.name}es")


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


def test_another_tensor_file_than_the_saved_one_is_refused(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch")
    file, sidecar = patch / "adapter_model.safetensors", patch / "lorakit.json"
    assert json.loads(sidecar.read_text())["xxh3_128"].keys() == {file.name}
    read_patch(patch)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1

    file.write_bytes(content)

    for read in (read_patch, open_patch):
        with pytest.raises(PatchError, match=r"is not the file that was saved .its xxh3_128"):
            read(patch)
