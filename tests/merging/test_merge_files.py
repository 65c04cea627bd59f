"""A merge's files: bounded memory, a kill, conversion, new vocabularies, checks of every value."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.cli import main
from lorakit.errors import BaseModelError, MergeError, PatchError
from lorakit.files.base_files import open_base_files
from lorakit.merging.verify import verify_merge
from lorakit.patch import check_base, read_patch
from lorakit.patch.find import open_weighted
from lorakit.patch.patch import FLOATS
from tests.helpers.bases import make_base, tensors_of
from tests.helpers.fork_server import run_python
from tests.helpers.models import build
from tests.helpers.patches import exact, make_patch
from tests.helpers.rounding import nearest

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A bfloat16 base in many files."""
    folder = make_base(tmp_path_factory.mktemp("sharded") / "base", tokenizer, dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


LIMITED = """
import resource, sys
from lorakit.merging.merge import merge
from lorakit.base.transformers_io import load_skeleton
from pathlib import Path
base, patch, out, largest = sys.argv[1:]
load_skeleton(Path(base))  # everything is imported
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 2 * int(largest) + 100_000_000,) * 2)
merge(base, patch, out=out)
"""


@pytest.mark.spread
@pytest.mark.matrix
def test_memory_is_bounded_by_the_largest_tensor_whatever_the_base(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(
        tmp_path / "base", tokenizer, dtype=torch.bfloat16, hidden_size=512, intermediate_size=2048,
        num_hidden_layers=64, num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    patch = make_patch(base, tmp_path / "patch", torch.bfloat16, rank=4)
    files = open_base_files(base)
    largest = max(entry.end - entry.start for shard in files.shards for entry in shard.entries.values())
    assert sum(shard.path.stat().st_size for shard in files.shards) > 4 * (2 * largest + 100_000_000)

    command = [sys.executable, "-c", LIMITED, str(base), str(patch), str(tmp_path / "out"), str(largest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.63.mlp.down_proj.weight"
    assert torch.equal(after[name], exact(before[name], (patch, name.removesuffix(".weight"), 1.0)))


KILLED = """
import os, signal, sys
from lorakit.merging.merge import merge
base, patch, out, last = sys.argv[1:]
fsync, calls = os.fsync, []
def dying(handle):
    calls.append(handle)
    if len(calls) == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)
os.fsync = dying
merge(base, patch, out=out)
"""


@pytest.mark.spread
@pytest.mark.parametrize("calls", [1, 7, 15])
def test_a_killed_merge_leaves_nothing_half_done_and_the_same_command_starts_over(
    sharded: Path, tmp_path: Path, calls: int
) -> None:
    patch, out = make_patch(sharded, tmp_path / "patch", torch.bfloat16), tmp_path / "out"
    uninterrupted = content(lorakit.merge(sharded, patch, out=tmp_path / "uninterrupted"))
    assert run_python("-c", KILLED, sharded, patch, out, calls).returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.glob(".out.*"))) == 1

    lorakit.merge(sharded, patch, out=out)

    assert content(out) == uninterrupted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "patch", "uninterrupted"]


def test_two_merges_into_one_folder_do_not_mix(base: Path, tmp_path: Path) -> None:
    one, two = make_patch(base, tmp_path / "one"), make_patch(base, tmp_path / "two", seed=1)
    out, expected = tmp_path / "out", content(lorakit.merge(base, two, out=tmp_path / "expected"))

    def merge_the_other(text: str) -> None:
        if not out.exists():
            lorakit.merge(base, two, out=out)

    with pytest.raises(MergeError, match="out exists already"):
        lorakit.merge(base, one, out=out, say=merge_the_other)
    assert content(out) == expected
    assert not list(tmp_path.glob(".out*"))


def test_files_without_a_touched_tensor_are_the_same_to_the_byte(sharded: Path, tmp_path: Path) -> None:
    sharded = shutil.copytree(sharded, tmp_path / "base")
    for file in sharded.glob("*.safetensors"):  # a header that another program pads otherwise
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        file.write_bytes((length + 24).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 24 + raw[8 + length :])
    patch = make_patch(sharded, tmp_path / "patch", torch.bfloat16, targets=["model.layers.1.mlp.up_proj"])

    out = lorakit.merge(sharded, patch, out=tmp_path / "out")

    before, after = content(sharded), content(out)
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) == 1
    assert after["model.safetensors.index.json"] == before["model.safetensors.index.json"]
    shard = changed.pop()
    length = 8 + int.from_bytes(before[shard][:8], "little")
    assert before[shard][:length] == after[shard][:length]


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_merge_into_every_dtype_is_the_exact_sum_rounded_once(
    tmp_path: Path, tokenizer: Any, dtype: torch.dtype, method: str
) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    before = {name: tensor.to(dtype) for name, tensor in tensors_of(base).items()}
    save_file(before, base / "model.safetensors", metadata={"format": "pt"})
    patch = make_patch(base, tmp_path / "patch", dtype, method=method, targets=["q_proj"], modules_to_save=["lm_head"])

    out = lorakit.merge(base, patch, out=tmp_path / "out")

    after = tensors_of(out)
    lines = {line["tensor"]: line for line in json.loads((out / "merge.json").read_text())["merged"]}
    assert len(lines) == 3
    for name, W in before.items():
        if "q_proj" in name:
            expected = exact(W, (patch, name.removesuffix(".weight"), 1.0))
        else:
            expected = read_patch(patch).full_tensors["lm_head.weight"].to(dtype) if "lm_head" in name else W
        if "q_proj" in name and dtype is torch.float64:  # two ways to add round otherwise
            torch.testing.assert_close(after[name], expected, rtol=1e-14, atol=1e-15)
        else:
            assert torch.equal(after[name], expected), name
        assert torch.equal(expected, W) == (name not in lines)
        assert (lines.get(name, {}).get("norm_of_rounding") == 0.0) == (name in lines and is_exact(dtype, name))
    assert all(line["changed"] for line in lines.values())


def is_exact(dtype: torch.dtype, name: str) -> bool:
    """True if no value is rounded: all sums are float64, and a full tensor has the dtype it is trained in."""
    return dtype is torch.float64 or (dtype is torch.float32 and "lm_head" in name)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_merge_can_convert_on_the_way(sharded: Path, tmp_path: Path, name: str) -> None:
    patch, dtype = make_patch(sharded, tmp_path / "patch", torch.bfloat16, targets=["q_proj"]), getattr(torch, name)

    out = lorakit.merge(sharded, patch, out=tmp_path / "out", dtype=name, verify=True)

    before, after = tensors_of(sharded), tensors_of(out)
    for key, W in before.items():
        W = W.double()
        if "q_proj" in key:
            layer = read_patch(patch).layers[key.removesuffix(".weight")]
            W = W + layer.scale * (layer.tensors["lora_B"].double() @ layer.tensors["lora_A"].double())
        assert torch.equal(after[key], nearest(W, dtype)), key
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == name
    assert "torch_dtype" not in config
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in after.values())
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype is dtype


def test_values_that_do_not_fit_the_dtype_are_refused(base: Path, tmp_path: Path) -> None:
    large = shutil.copytree(base, tmp_path / "large")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, large / "model.safetensors", metadata={"format": "pt"})
    patch = make_patch(large, tmp_path / "patch", targets=["q_proj"])
    with pytest.raises(MergeError, match=r"model.norm.weight: the merged values do not fit torch.float16"):
        lorakit.merge(large, patch, out=tmp_path / "out", dtype="float16")
    with pytest.raises(MergeError, match="dtype: one of float32, bfloat16, float16, got 'int8'"):
        lorakit.merge(large, patch, out=tmp_path / "out", dtype="int8")
    assert not list(tmp_path.glob(".out*"))


def test_the_ledger_lists_every_change_and_its_rounding_loss(sharded: Path, tmp_path: Path) -> None:
    one = make_patch(sharded, tmp_path / "one", torch.bfloat16, targets=["q_proj", "down_proj"])
    two = make_patch(sharded, tmp_path / "two", torch.bfloat16, seed=1, rank=2, targets=["q_proj"])

    out = lorakit.merge(sharded, one, (two, -0.5), out=tmp_path / "out")

    ledger = json.loads((out / "merge.json").read_text())
    assert [(a["path"], a["weight"]) for a in ledger["adapters"]] == [(str(one), 1.0), (str(two), -0.5)]
    assert len(ledger["merged"]) == 6
    before, after = tensors_of(sharded), tensors_of(out)
    for line in ledger["merged"]:
        sources = [(one, 1.0), (two, -0.5)] if "q_proj" in line["layer"] else [(one, 1.0)]
        deltas = [
            weight * layer.scale * (layer.tensors["lora_B"].double() @ layer.tensors["lora_A"].double())
            for folder, weight in sources
            for layer in [read_patch(folder).layers[line["layer"]]]
        ]
        W = before[line["tensor"]].double()
        total = W + sum(deltas)
        lost = float((total - after[line["tensor"]].double()).norm())
        assert line["norm_of_rounding"] == pytest.approx(lost)
        assert line["lost_to_rounding"] == pytest.approx(lost / float((total - W).norm()))
        assert 0 < line["lost_to_rounding"] < 1
    assert ledger["rounding"] is None


def test_a_merge_says_what_rounding_to_16_bits_loses(base: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(small)
    patch = make_patch(small, tmp_path / "patch", torch.bfloat16, targets=["q_proj", "down_proj"])

    def merged(name: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
        said: list[str] = []
        out = lorakit.merge(small, (patch, 0.02), out=tmp_path / name, say=said.append, **options)
        return json.loads((out / "merge.json").read_text()), [line for line in said if line.startswith("rounding")]

    ledger, (line,) = merged("bfloat16")
    lost = {part["tensor"]: part["lost_to_rounding"] for part in ledger["merged"]}
    worst = max(lost, key=lambda name: lost[name])
    assert ledger["rounding"] == {
        "dtype": "bfloat16", "tensors": 4, "median": median(lost.values()), "most": lost[worst], "tensor": worst,
    }  # fmt: skip
    assert 0 < ledger["rounding"]["median"] < lost[worst] < 1
    assert f"to bfloat16 loses {median(lost.values()):.1%} of the change (median of 4 tensors; most" in line
    assert f"{lost[worst]:.1%}: {worst}); --dtype float32 keeps it" in line
    ledger, lines = merged("float32", dtype="float32")
    assert (ledger["rounding"], lines) == (None, [])


def test_one_changed_value_of_the_base_is_detected(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer, intermediate_size=320)
    patch = make_patch(base, tmp_path / "patch")
    other = shutil.copytree(base, tmp_path / "other")
    weights = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name].view(-1)[517] += 1e-6  # between two samples
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    read = read_patch(patch)

    check_base(read, other, full=False)
    with pytest.raises(PatchError, match=r"1 of 14 adapted weights \(model.layers.1.mlp.up_proj first\)"):
        check_base(read, other)
    check_base(read, base)
    with pytest.raises(PatchError, match=r"trained on another base than .*: values of model.layers.1.mlp.up_proj"):
        lorakit.merge(other, patch, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = lorakit.merge(other, patch, out=tmp_path / "out", allow={"base"})
    assert json.loads((out / "merge.json").read_text())["allow"] == ["base"]


def test_verifying_finds_a_merge_that_is_wrong(base: Path, tmp_path: Path) -> None:
    patch, said = make_patch(base, tmp_path / "patch"), list[str]()
    out = lorakit.merge(base, patch, out=tmp_path / "out", verify=True, say=said.append)
    ledger = json.loads((out / "merge.json").read_text())
    assert ledger["verified"]["layers"] == 14
    assert ledger["verified"]["largest_share_of_bound"] < 1
    assert ledger["verified"]["not_compared"] == {}
    assert any(line.startswith("verified: all 14 merged layers compute the same as base + adapters") for line in said)

    weights = load_file(out / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3] *= 1.01
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"model.layers.1.mlp.up_proj: merged and adapted outputs differ by"):
        verify_merge(base, open_weighted([patch]), out, ledger["merged"], print)

    del weights["model.norm.weight"]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"model\.norm\.weight"):
        verify_merge(base, open_weighted([patch]), out, ledger["merged"], print)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_full_tensors_of_several_patches_are_weighted_differences(tmp_path: Path, tokenizer: Any) -> None:
    build("llama").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    folders = []
    for seed in range(2):
        peft = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
        torch.manual_seed(seed)
        for key, tensor in peft.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                tensor.data.add_(torch.randn_like(tensor) * 0.1)
        peft.save_pretrained(tmp_path / f"p{seed}")
        folders.append(tmp_path / f"p{seed}")

    out = lorakit.merge(tmp_path / "base", (folders[0], 0.5), (folders[1], 2.0), out=tmp_path / "out")

    before, after = tensors_of(tmp_path / "base"), tensors_of(out)
    W = before["lm_head.weight"].double()
    full_tensors = [read_patch(folder).full_tensors["lm_head.weight"].double() for folder in folders]
    assert torch.equal(after["lm_head.weight"], (W + 0.5 * (full_tensors[0] - W) + 2.0 * (full_tensors[1] - W)).float())
    lines = [line for line in json.loads((out / "merge.json").read_text())["merged"] if "parameter" in line]
    assert [line["patch"] for line in lines] == [0, 1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_full_tensor_is_copied_and_not_a_sum_that_could_round(tmp_path: Path, tokenizer: Any) -> None:
    model = build("llama")
    model.lm_head.weight.data[0, 0] = 1e30
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    peft.base_model.model.lm_head.modules_to_save["default"].weight.data[0, 0] = 1e-30
    for key, tensor in peft.named_parameters():
        if "lora_B" in key:
            tensor.data.normal_()
    peft.save_pretrained(tmp_path / "patch")

    out = lorakit.merge(tmp_path / "base", tmp_path / "patch", out=tmp_path / "out")

    assert tensors_of(out)["lm_head.weight"][0, 0] == torch.tensor(1e-30)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")
def test_the_target_may_be_on_another_file_system(sharded: Path, tmp_path: Path) -> None:
    patch = make_patch(sharded, tmp_path / "patch", torch.bfloat16, targets=["q_proj"])
    target = Path("/dev/shm") / f"lorakit-test-{os.getpid()}"
    try:
        lorakit.merge(sharded, patch, out=target / "out")
        uninterrupted = content(lorakit.merge(sharded, patch, out=tmp_path / "out"))
        assert content(target / "out") == uninterrupted
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_a_system_without_copies_in_the_kernel_writes_the_same_bytes(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = make_patch(sharded, tmp_path / "patch", targets=["q_proj"])
    expected = content(lorakit.merge(sharded, patch, out=tmp_path / "out"))
    monkeypatch.delattr(os, "copy_file_range")  # as on macOS

    assert content(lorakit.merge(sharded, patch, out=tmp_path / "other")) == expected


def test_inputs_that_change_under_a_merge_are_noticed(tmp_path: Path, base: Path) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    one, two = make_patch(own, tmp_path / "one"), make_patch(own, tmp_path / "two", seed=1)

    def replace(text: str) -> None:
        (two / "adapter_model.safetensors").replace(one / "adapter_model.safetensors")

    with pytest.raises(MergeError, match="changed while it was merged; nothing was written"):
        lorakit.merge(own, one, out=tmp_path / "out", say=replace)
    assert not (tmp_path / "out").exists()


def test_a_name_is_not_bound_to_another_modules_tensor(tmp_path: Path, tokenizer: Any) -> None:
    base = make_base(tmp_path / "base", tokenizer)
    patch = make_patch(base, tmp_path / "p", targets=["lm_head"])
    tensors = load_file(base / "model.safetensors")
    tensors["draft.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"no tensors for 'lm_head.weight'"):
        lorakit.merge(base, patch, out=tmp_path / "out", allow={"base"})


@pytest.mark.parametrize("setting", [{"hidden_size": "abc"}, {"num_attention_heads": 0}, {"hidden_act": "nope"}])
def test_a_broken_config_is_an_error_that_names_the_folder(tmp_path: Path, base: Path, setting: dict[str, Any]) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(BaseModelError, match="transformers cannot load it"):
        lorakit.merge(own, make_patch(base, tmp_path / "p"), out=tmp_path / "out")


@pytest.mark.parametrize("damage", ["flip", "cut", "other file", "no file", "no ledger"])
def test_a_merged_model_whose_weights_changed_is_refused_by_every_command(
    damage: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = lorakit.merge(sharded, make_patch(sharded, tmp_path / "patch", torch.bfloat16), out=tmp_path / "merged")
    for _ in range(2):
        lorakit.load(merged)
    path = sorted(merged.glob("*.safetensors"))[3]
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 4
    elif damage == "cut":
        del content[-2:]
    path.write_bytes(sorted(merged.glob("*.safetensors"))[4].read_bytes() if damage == "other file" else content)
    if damage == "no file":
        path.unlink()
    if damage == "no ledger":
        (merged / "merge.json").write_text("[]")

    expected = "merge.json: cannot be read" if damage.startswith("no ") else "is not the file that the merge wrote"
    with pytest.raises(BaseModelError, match=expected):
        lorakit.load(merged)
    for command in (
        ["show", merged],
        ["generate", merged, "--prompt", "a"],
        ["merge", merged, tmp_path / "patch", "--out", tmp_path / "again"],
    ):
        assert main(list(map(str, command))) == 2
        assert expected in capsys.readouterr().err
    (merged / "merge.json").unlink()
    if damage == "flip":
        lorakit.load(merged)
