"""An adapter means the same in every format it is converted to, bit for bit, or the conversion is refused by name."""

import errno
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lorakit.errors import BaseModelError, PatchError, TemporaryFailure
from lorakit.files.atomic import digest
from lorakit.files.safetensors import open_tensors
from lorakit.formats.adapter import Base, Options
from lorakit.formats.convert import FORMATS, convert
from lorakit.formats.factors import PLAIN, exact_alpha
from lorakit.formats.kohya import read_kohya, write_kohya
from lorakit.formats.metadata import ConversionSource
from lorakit.lora import METHODS
from lorakit.patch import BaseShapes, PatchLayer, check_base, new_patch, read_patch, write_patch
from tests.helpers.models import build, outputs
from tests.helpers.patches import make_patch

ROOT = Path(__file__).parents[2]
TENSORS = "adapter_model.safetensors"
FOREIGN = [name for name in FORMATS if name != "peft"]
Q, V, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj"
SIZES = {Q: (32, 32), V: (16, 32), DOWN: (32, 48)}  # (out, in) in the small base
FLAT_Q, FLAT_DOWN = Q.replace(".", "_"), DOWN.replace(".", "_")


def target_path(folder: Path, to: str, name: str = "out") -> Path:
    return folder / (name if FORMATS[to].folder else f"{name}.safetensors")


def tensor_file(path: Path) -> Path:
    return (
        path / ("adapters.safetensors" if (path / "adapters.safetensors").exists() else TENSORS)
        if path.is_dir()
        else path
    )


def metadata(path: Path) -> dict[str, str]:
    with safe_open(tensor_file(path), "pt") as file:
        return file.metadata() or {}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def layer(
    module: str, rank: int = 4, alpha: float = 6, method: str = "lora", dtype: torch.dtype = torch.float32
) -> PatchLayer:
    out, wide = SIZES[module]
    tensors = {"lora_A": normal(rank, wide, dtype=dtype), "lora_B": normal(out, rank, dtype=dtype)}
    return PatchLayer(method, rank, alpha, (out, wide), tensors)


def write(folder: Path, layers: Mapping[str, PatchLayer], **full_tensors: torch.Tensor) -> Path:
    facts = {"lorakit": "0", "step": 7}
    return write_patch(
        folder, new_patch(layers, metadata=facts, base_model="some/base", dropout=0.1, full_tensors=full_tensors)
    )


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(one: Path, other: Path) -> None:
    """Check for byte-identical tensors and the same scale of every layer."""
    ours, theirs = load_file(one / TENSORS), load_file(other / TENSORS)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert bits(tensor) == bits(theirs[key]), key
    first, second = read_patch(one), read_patch(other)
    assert {n: (x.rank, x.scale, x.sizes, x.embedding) for n, x in first.layers.items()} == {
        n: (x.rank, x.scale, x.sizes, x.embedding) for n, x in second.layers.items()
    }


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """Return module -> s B A."""
    layers = read_patch(folder).layers.items()
    return {n: x.scale * x.tensors["lora_B"].double() @ x.tensors["lora_A"].double() for n, x in layers}


# Oracles: the update that each program computes from its own files.


def by_kohya(path: Path) -> dict[str, torch.Tensor]:
    t, found = load_file(path), {}
    for key in t:
        name, _, end = key.partition(".")
        if end == "lora_down.weight":
            down, up, alpha = t[key], t[f"{name}.lora_up.weight"], t.get(f"{name}.alpha")
            scale = (float(alpha) if alpha is not None and alpha != 0 else down.shape[0]) / down.shape[0]
            found[name] = scale * up.double() @ down.double()
    return found


def by_diffusers(path: Path, model: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Load as diffusers does: the LoraConfig in the header, PEFT's injection, PEFT's delta of each layer."""
    header_config = json.loads(metadata(path)["lora_adapter_metadata"])
    config = LoraConfig(**{key.removeprefix(prefix): v for key, v in header_config.items() if key.startswith(prefix)})
    state = {key.removeprefix(prefix): tensor for key, tensor in load_file(path).items()}
    inject_adapter_in_model(config, model)
    assert not set_peft_model_state_dict(model, state).unexpected_keys
    names = {key.rpartition(".lora_A.")[0] for key in state} - {""}
    return {name: model.get_submodule(name).get_delta_weight("default").double() for name in names}


def by_loralib(path: Path, lora_alpha: float) -> dict[str, torch.Tensor]:
    t = load_file(path)
    names = {key.removesuffix(".lora_A") for key in t if key.endswith(".lora_A")}
    return {
        n: lora_alpha / t[f"{n}.lora_A"].shape[0] * t[f"{n}.lora_B"].double() @ t[f"{n}.lora_A"].double() for n in names
    }


def by_mlx(folder: Path) -> dict[str, torch.Tensor]:
    config, t = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapters.safetensors")
    names, scale = (
        {key.removesuffix(".lora_a") for key in t if key.endswith(".lora_a")},
        config["lora_parameters"]["scale"],
    )
    for name in names:  # mlx-lm turns a layer into an adapted one when its name below layers.N. is a key
        assert name.split(".", 3)[3] in config["lora_parameters"]["keys"]
        assert t[f"{name}.lora_a"].shape[1] == config["lora_parameters"]["rank"]
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == -1
    return {n: scale * t[f"{n}.lora_b"].double().T @ t[f"{n}.lora_a"].double().T for n in names}


def assert_close(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 1e-13
) -> None:
    assert got.keys() == expected.keys()
    for name, delta in expected.items():
        assert (got[name] - delta).norm() <= tolerance * delta.norm()


@pytest.mark.parametrize("to", FOREIGN)
@pytest.mark.parametrize("name", ["json", "zorvian"])
def test_a_shipped_patch_goes_to_every_format_and_comes_back_the_same(tmp_path: Path, name: str, to: str) -> None:
    patch, notes = ROOT / "adapters" / name, []

    there = convert(patch, target_path(tmp_path, to), to=to, base="builtin:tiny", say=notes.append)
    back = convert(there, tmp_path / "back", base="builtin:tiny")

    assert_same(patch, back)
    assert (back / "adapter_config.json").read_bytes() == (patch / "adapter_config.json").read_bytes()
    facts, old = read_patch(back).metadata, read_patch(patch)
    assert facts["converted"]["from"] == to
    assert {key: value for key, value in facts.items() if key != "converted"} == old.metadata
    assert "# back\n" in (back / "README.md").read_text()
    check_base(read_patch(back), ROOT / "lorakit" / "assets" / "tiny")  # it still knows its base
    assert f"28 layers, from peft to {to}" in notes[0]
    sha256 = digest(patch / "adapter_model.safetensors")
    assert json.loads(metadata(there)["lorakit"])["converted"] == {"from": "peft", "source_sha256": sha256}


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_program_computes_the_same_update(tmp_path: Path, base: Path, method: str, dtype: torch.dtype) -> None:
    layers = {module: layer(module, 16, 6, method, dtype) for module in SIZES}
    patch = write(tmp_path / "patch", layers)
    expected = deltas(patch)

    kohya = convert(patch, tmp_path / "kohya.safetensors", to="kohya", prefix="lora_te1")
    assert_close(by_kohya(kohya), {f"lora_te1_{name.replace('.', '_')}": delta for name, delta in expected.items()})
    notes: list[str] = []
    loralib = convert(patch, tmp_path / "loralib.safetensors", to="loralib", say=notes.append)
    assert_close(by_loralib(loralib, alpha_of(notes[0])), expected)
    assert_close(by_mlx(convert(patch, tmp_path / "mlx", to="mlx")), expected)
    if dtype is torch.float32:
        diffusers = convert(patch, tmp_path / "diffusers.safetensors", to="diffusers", prefix="text_encoder")
        assert_close(by_diffusers(diffusers, build_small(base), "text_encoder."), expected, 1e-6)  # PEFT: in float32


def alpha_of(note: str) -> float:
    return float(note.partition("lora_alpha=")[2].partition(":")[0])


def build_small(base: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(base)


def test_patterns_and_rslora_are_expressed_layer_by_layer(tmp_path: Path, base: Path) -> None:
    layers = {Q: layer(Q, 4, 6), V: layer(V, 2, 6), DOWN: layer(DOWN, 3, 7.5)}
    patch = write(tmp_path / "patch", layers)
    rslora = write(tmp_path / "rslora", {Q: layer(Q, 8, 5, "rslora"), DOWN: layer(DOWN, 4, 3, "rslora")})

    kohya = convert(patch, tmp_path / "k.safetensors", to="kohya")
    assert {float(t) for key, t in load_file(kohya).items() if key.endswith("alpha")} == {6, 7.5}
    assert_same(patch, convert(kohya, tmp_path / "k_back", base=base))
    for source, name in ((patch, "p"), (rslora, "r")):
        diffusers = convert(source, tmp_path / f"{name}.safetensors", to="diffusers")
        assert_close(by_diffusers(diffusers, build_small(base)), deltas(source), 1e-6)
        assert_same(source, convert(strip(diffusers), tmp_path / f"{name}_back"))
    with pytest.raises(
        PatchError, match=r"q_proj: no float32 alpha divided by rank 8 is its scale 1.76776.*\(rslora, alpha 5\)"
    ):
        convert(rslora, tmp_path / "no.safetensors", to="kohya")
    with pytest.raises(
        PatchError, match="q_proj has scale 1.5 and rank 4, .*down_proj has 2.5 and 3; mlx-lm has one of both"
    ):
        convert(patch, tmp_path / "no", to="mlx")
    with pytest.raises(PatchError, match="q_proj has alpha 6.0 and .*down_proj has 7.5; a loralib file holds none"):
        convert(patch, tmp_path / "no.safetensors", to="loralib")
    irrational = write(tmp_path / "irrational", {Q: layer(Q, 8, 5, "rslora")})
    notes: list[str] = []
    loralib = strip(convert(irrational, tmp_path / "l.safetensors", to="loralib", say=notes.append))
    assert_same(irrational, convert(loralib, tmp_path / "l_back", alpha=alpha_of(notes[0])))  # to the last digit
    tenth = write(tmp_path / "tenth", {Q: layer(Q, 4, 0.1)})
    with pytest.raises(PatchError, match="no float32 alpha divided by rank 4 is its scale 0.025"):
        convert(tenth, tmp_path / "no.safetensors", to="kohya")


def strip(path: Path) -> Path:
    """Remove lorakit's metadata from a file."""
    foreign = {key: value for key, value in metadata(path).items() if key != "lorakit"}
    save_file(load_file(path), path, metadata=foreign)
    return path


def test_a_stripped_file_still_means_the_same(tmp_path: Path, base: Path) -> None:
    patch = write(tmp_path / "patch", {module: layer(module, 4, 6, "rslora") for module in SIZES})
    for to in FOREIGN:
        there = convert(patch, target_path(tmp_path, to, to), to=to)
        strip(tensor_file(there))
        options = {"alpha": 12.0} if to == "loralib" else {}

        back = convert(there, tmp_path / f"{to}_back", base=base, **options)

        assert_same(patch, back)
        config = json.loads((back / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)
        assert set(read_patch(back).metadata) == {"lorakit", "converted"}
        model = build_small(base)
        PeftModel.from_pretrained(model, back)  # warns when a tensor finds no place


def test_lorakits_metadata_is_ignored_if_the_tensors_changed(tmp_path: Path) -> None:
    patch = write(tmp_path / "patch", {Q: layer(Q, 4, 6, "rslora")})
    for to in ("diffusers", "loralib"):
        file = convert(patch, target_path(tmp_path, to, to), to=to)
        save_file({key: t * 2 for key, t in load_file(file).items()}, file, metadata=metadata(file))
    assert "step" not in read_patch(convert(tmp_path / "diffusers.safetensors", tmp_path / "d")).metadata
    header_config = json.loads(
        metadata(convert(patch, tmp_path / "m.safetensors", to="diffusers"))["lora_adapter_metadata"]
    )
    changed = metadata(tmp_path / "m.safetensors") | {
        "lora_adapter_metadata": json.dumps(header_config | {"lora_alpha": 10})
    }
    save_file(load_file(tmp_path / "m.safetensors"), tmp_path / "m.safetensors", metadata=changed)
    layers = read_patch(convert(tmp_path / "m.safetensors", tmp_path / "m")).layers
    assert layers[Q].scale == 5  # from the format's own header
    with pytest.raises(PatchError, match="does not hold its alpha"):
        convert(tmp_path / "loralib.safetensors", tmp_path / "l")


# Files as the other programs write them.


def kohya_file(path: Path, *, prefix: str = "lora_te_", **changes: torch.Tensor | None) -> Path:
    """Write a file as sd-scripts does with --save_precision fp16: alphas too, in its order, with its metadata."""
    t: dict[str, torch.Tensor | None] = {}
    for module, rank in ((Q, 4), (DOWN, 2)):
        name, (out, wide) = prefix + module.replace(".", "_"), SIZES[module]
        t[f"{name}.alpha"] = torch.tensor(2.0, dtype=torch.float16)
        t[f"{name}.lora_down.weight"] = normal(rank, wide, dtype=torch.float16)
        t[f"{name}.lora_up.weight"] = normal(out, rank, dtype=torch.float16)
    t |= {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: v for key, v in t.items() if v is not None}, path, metadata={"ss_network_module": "networks.lora"})
    return path


@pytest.mark.parametrize(
    "prefix", ["lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_transformer_", "lycoris_"]
)
def test_kohya_files_are_read(tmp_path: Path, base: Path, prefix: str) -> None:
    name = f"{prefix}{FLAT_Q}"
    file = kohya_file(
        tmp_path / "k.safetensors", prefix=prefix, **{f"{name}.alpha": torch.tensor(3)}
    )  # saved unrounded
    if prefix == "lycoris_":
        with pytest.raises(PatchError, match="prefix="):
            convert(file, tmp_path / "patch", base=base)

    patch = convert(file, tmp_path / "patch", base=base, prefix=prefix if prefix == "lycoris_" else None)

    expected = {f"{prefix}{n.replace('.', '_')}": delta for n, delta in deltas(patch).items()}
    assert_close(expected, by_kohya(file))
    read = read_patch(patch)
    assert {n: (x.rank, x.alpha) for n, x in read.layers.items()} == {Q: (4, 3), DOWN: (2, 2)}
    assert bits(read.layers[Q].tensors["lora_A"]) == bits(load_file(file)[f"{name}.lora_down.weight"])
    assert read.config.base_model == str(base)


def test_a_missing_or_zero_alpha_of_kohya_is_the_rank(tmp_path: Path, base: Path) -> None:
    changes = {f"lora_te_{FLAT_Q}.alpha": None, f"lora_te_{FLAT_DOWN}.alpha": torch.tensor([0.0])}
    patch = convert(kohya_file(tmp_path / "k.safetensors", **changes), tmp_path / "patch", base=base)
    assert {x.scale for x in read_patch(patch).layers.values()} == {1.0}


def test_a_kohya_file_of_several_models_needs_a_prefix(tmp_path: Path, base: Path) -> None:
    both = load_file(kohya_file(tmp_path / "1.safetensors")) | load_file(
        kohya_file(tmp_path / "2.safetensors", prefix="lora_unet_")
    )
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(PatchError, match=r"several models \(lora_te_, lora_unet_\); say which one \(--prefix,"):
        convert(tmp_path / "both.safetensors", tmp_path / "patch", base=base)
    with pytest.raises(PatchError, match="no tensor's name begins with 'lora_te2_'"):
        convert(tmp_path / "both.safetensors", tmp_path / "patch", base=base, prefix="lora_te2")

    patch = convert(tmp_path / "both.safetensors", tmp_path / "patch", base=base, prefix="lora_te")

    assert_same(patch, convert(tmp_path / "1.safetensors", tmp_path / "one", base=base))
    assert (
        read_patch(patch).metadata["converted"]["prefix"] == "lora_te"
    )  # tensors with other prefixes were left out, as requested


SPELLINGS = {
    "peft": (".lora_A.weight", ".lora_B.weight"), "old": (".lora.down.weight", ".lora.up.weight"),
    "text": (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    "comfy": (".lora_down.weight", ".lora_up.weight"),
}  # fmt: skip


def diffusers_file(
    path: Path,
    spelling: str = "peft",
    prefix: str = "",
    alpha: float | None = 3.0,
    header: Any = None,
    **changes: torch.Tensor | None,
) -> Path:
    down, up = SPELLINGS[spelling]
    t: dict[str, torch.Tensor | None] = {}
    for module, rank in ((Q, 4), (DOWN, 4)):
        out, wide = SIZES[module]
        t |= {f"{prefix}{module}{down}": normal(rank, wide), f"{prefix}{module}{up}": normal(out, rank)}
        t |= {f"{prefix}{module}.alpha": torch.tensor(alpha)} if alpha is not None else {}
    header_config = {} if header is None else {"lora_adapter_metadata": json.dumps(header)}
    save_file(
        {key: v for key, v in (t | changes).items() if v is not None}, path, metadata={"format": "pt"} | header_config
    )
    return path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_diffusers_files_are_read_in_every_spelling(tmp_path: Path, base: Path, spelling: str) -> None:
    file = diffusers_file(tmp_path / "d.safetensors", spelling, "text_encoder.")
    plain = diffusers_file(tmp_path / "plain.safetensors", spelling, alpha=None)

    patch = read_patch(convert(file, tmp_path / "patch", prefix="text_encoder"))
    with_base = read_patch(convert(file, tmp_path / "with_base", base=base))  # which shows what is a prefix
    no_alpha = read_patch(convert(plain, tmp_path / "no_alpha"))

    t = load_file(file)
    for found in (patch, with_base):
        assert found.layers.keys() == {Q, DOWN}
        assert bits(found.layers[Q].tensors["lora_B"]) == bits(t[f"text_encoder.{Q}{SPELLINGS[spelling][1]}"])
        assert {x.scale for x in found.layers.values()} == {0.75}
    assert {x.scale for x in no_alpha.layers.values()} == {1.0}
    assert with_base.config.raw["target_modules"] == sorted([Q, DOWN])
    with pytest.raises(PatchError, match=r"components of a pipeline \(text_encoder\); say which .* prefix=''\)"):
        convert(file, tmp_path / "no")


def test_the_loraconfig_in_a_diffusers_header_is_used(tmp_path: Path) -> None:
    config = LoraConfig(
        r=4, lora_alpha=5, use_rslora=True, alpha_pattern={"down_proj": 7}, target_modules=["q_proj", "down_proj"]
    )
    header_config = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    packed = {f"transformer.{key}": value for key, value in header_config.items()}
    for name, header, prefix in (("model", header_config, ""), ("pipeline", packed, "transformer.")):
        file = diffusers_file(tmp_path / f"{name}.safetensors", prefix=prefix, alpha=None, header=header)
        layers = read_patch(convert(file, tmp_path / name)).layers
        assert {n: x.scale for n, x in layers.items()} == {Q: 2.5, DOWN: 3.5}


def test_names_that_begin_like_a_component_are_resolved_by_the_base(tmp_path: Path) -> None:
    gpt2 = build("gpt2")
    gpt2.save_pretrained(tmp_path / "gpt2")
    patch = make_gpt2_patch(gpt2, tmp_path / "patch")
    file = strip(
        convert(patch, tmp_path / "g.safetensors", to="diffusers")
    )  # transformer.h.0.attn.c_attn, its own name
    save_file(load_file(file), file)
    with pytest.raises(PatchError, match="prefix="):
        convert(file, tmp_path / "no")

    back = convert(file, tmp_path / "back", base=tmp_path / "gpt2")

    assert read_patch(back).layers.keys() == read_patch(patch).layers.keys()
    assert read_patch(back).config.raw["fan_in_fan_out"] is True
    assert read_patch(convert(file, tmp_path / "told", prefix="")).layers.keys() == read_patch(patch).layers.keys()


def make_gpt2_patch(model: Any, folder: Path) -> Path:
    from lorakit.lora import inject
    from lorakit.patch import save_patch

    return save_patch(inject(model, rank=2, alpha=2, targets=["c_attn"]), folder)


def loralib_file(path: Path, **changes: torch.Tensor) -> Path:
    """Write lora_state_dict(model) with save_file."""
    t = {
        f"{m}.lora_{x}": normal(*shape)
        for m, (out, wide) in SIZES.items()
        for x, shape in (("A", (4, wide)), ("B", (out, 4)))
    }
    save_file(t | changes, path)
    return path


def test_loralib_files_are_read_with_their_alpha(tmp_path: Path, base: Path) -> None:
    file = loralib_file(tmp_path / "l.safetensors")
    with pytest.raises(
        PatchError,
        match=r"l.safetensors: a loralib file does not hold its alpha; give .* \(--alpha, in Python alpha=\)",
    ):
        convert(file, tmp_path / "no", base=base)

    patch = convert(file, tmp_path / "patch", alpha=9, base=base)

    assert_close(deltas(patch), by_loralib(file, 9))
    repeated = convert(patch, tmp_path / "again.safetensors", to="loralib")
    assert {key: bits(t) for key, t in load_file(repeated).items()} == {
        key: bits(t) for key, t in load_file(file).items()
    }
    assert_same(patch, convert(repeated, tmp_path / "kept"))  # lorakit's own file stores the alpha
    with pytest.raises(PatchError, match="alpha 8 is given, and the file says 9.0; leave it out"):
        convert(repeated, tmp_path / "no", alpha=8)


def mlx_folder(
    folder: Path, config: Mapping[str, Any] | None = None, parameters: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """Write a folder as mlx_lm.lora does: all its arguments in the config, with an alpha that mlx-lm ignores."""
    folder.mkdir()
    t: dict[str, Any] = {}
    for module in (V, DOWN):
        out, wide = SIZES[module]
        t |= {
            f"{module}.lora_a": normal(wide, 8, dtype=torch.bfloat16),
            f"{module}.lora_b": normal(8, out, dtype=torch.bfloat16),
        }
    save_file({key: v for key, v in (t | changes).items() if v is not None}, folder / "adapters.safetensors")
    keys = ["self_attn.v_proj", "mlp.down_proj", "self_attn.q_proj"]
    inner = {"rank": 8, "alpha": 16, "dropout": 0.05, "scale": 20.0, "keys": keys} | dict(parameters or {})
    defaults = {
        "model": "mlx_model",
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": inner,
        "iters": 600,
    }
    content = {key: value for key, value in (defaults | dict(config or {})).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def test_mlx_folders_are_read(tmp_path: Path, base: Path) -> None:
    folder = mlx_folder(tmp_path / "mlx")

    patch = convert(folder, tmp_path / "patch", base=base)

    t, layers = load_file(folder / "adapters.safetensors"), read_patch(patch).layers
    for name in (V, DOWN):
        assert bits(layers[name].tensors["lora_A"]) == bits(t[f"{name}.lora_a"].T)
        assert bits(layers[name].tensors["lora_B"]) == bits(t[f"{name}.lora_b"].T)
        assert (layers[name].scale, layers[name].alpha) == (20.0, 160)
        expected = 20.0 * t[f"{name}.lora_b"].double().T @ t[f"{name}.lora_a"].double().T
        assert (deltas(patch)[name] - expected).norm() <= 1e-13 * expected.norm()
    repeated = convert(patch, tmp_path / "again", to="mlx")
    assert {key: bits(v) for key, v in load_file(repeated / "adapters.safetensors").items()} == {
        key: bits(v) for key, v in t.items()
    }
    assert read_patch(patch).config.dropout == 0.05


def test_foreign_to_foreign_is_the_same_as_by_way_of_a_patch(tmp_path: Path, base: Path) -> None:
    folder = mlx_folder(tmp_path / "mlx")
    kohya = convert(folder, tmp_path / "k.safetensors", to="kohya", prefix="lora_unet")
    diffusers = convert(
        kohya, tmp_path / "d.safetensors", to="diffusers", base=base, prefix="lora_unet"
    )  # of the source
    assert {key.rpartition(".lora_")[0] for key in load_file(diffusers)} == {V, DOWN}
    assert_same(convert(folder, tmp_path / "one"), convert(diffusers, tmp_path / "two"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own, on biases
@pytest.mark.parametrize("kind", ["lora_only", "all"])
def test_biases_fit_loralib_alone(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    trained = get_peft_model(
        build("opt"), LoraConfig(r=4, target_modules=["q_proj", "fc1"], bias=kind, init_lora_weights=False)
    )
    for name, parameter in trained.named_parameters():
        if name.endswith("bias") and parameter.requires_grad:
            parameter.data.normal_()
    trained.save_pretrained(tmp_path / "patch")

    file = convert(tmp_path / "patch", tmp_path / "l.safetensors", to="loralib")
    strip(file)
    back = convert(file, tmp_path / "back", alpha=8)

    assert_same(tmp_path / "patch", back)
    assert read_patch(back).config.raw["bias"] == kind
    theirs = PeftModel.from_pretrained(build("opt"), back).eval()
    assert torch.equal(outputs(theirs, "opt"), outputs(trained.eval(), "opt"))
    for to in ("kohya", "diffusers", "mlx"):
        with pytest.raises(
            PatchError, match=rf"bias is a full tensor of the base, and {to} has no place for it; merge"
        ):
            convert(tmp_path / "patch", target_path(tmp_path, to, "no"), to=to)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_embeddings_fit_loralib_alone(tmp_path: Path, base: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    get_peft_model(build_small(base), config).save_pretrained(tmp_path / "patch", save_embedding_layers=False)

    file = convert(tmp_path / "patch", tmp_path / "l.safetensors", to="loralib")

    assert_same(tmp_path / "patch", convert(file, tmp_path / "remembered"))
    strip(file)
    assert_same(tmp_path / "patch", convert(file, tmp_path / "by_base", base=base, alpha=8))
    with pytest.raises(
        PatchError,
        match=r"embed_tokens: may be an embedding or a linear layer; the base tells \(--base, in Python base=\)",
    ):
        convert(file, tmp_path / "no", alpha=8)
    for to in ("kohya", "diffusers", "mlx"):
        with pytest.raises(
            PatchError, match=f"model.embed_tokens is an embedding, and {to} has no place for its update"
        ):
            convert(tmp_path / "patch", target_path(tmp_path, to, "no"), to=to)


def test_a_patch_without_updates_is_refused(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file({"base_model.model.x.bias": normal(4)}, alone / TENSORS)
    (alone / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": "all"}')
    refused(tmp_path, alone, "alone: holds no updates of layers; there is nothing to convert", to="loralib")


def test_full_tensors_fit_no_foreign_format(tmp_path: Path) -> None:
    patch = write(tmp_path / "patch", {Q: layer(Q)}, **{"lm_head.weight": normal(64, 32)})
    for to in FOREIGN:
        with pytest.raises(
            PatchError, match=f"patch: lm_head.weight is a full tensor of the base, and {to} has no place"
        ):
            convert(patch, target_path(tmp_path, to), to=to)


# Refusals: the file, the tensor or setting, the reason.

N = f"lora_te_{FLAT_Q}"
BAD_KOHYA = {
    "half": ({f"{N}.lora_up.weight": None}, rf"k.safetensors: {N}.*the other half of {FLAT_Q} \(lora_B\) is missing"),
    "alpha alone": ({f"{N}.lora_up.weight": None, f"{N}.lora_down.weight": None}, f"{N}.alpha: the other half .* is missing"),
    "convolution": ({f"{N}.lora_down.weight": normal(4, 32, 3, 3)}, rf"{N}.lora_down.weight: shape \(4, 32, 3, 3\) is a convolution's"),
    "vector": ({f"{N}.lora_down.weight": normal(4)}, rf"{N}.lora_down.weight: shape \(4,\) is not that of a matrix"),
    "mixed rank": ({f"{N}.lora_up.weight": normal(32, 5)}, "has rank 4 and .*lora_up.weight has rank 5"),
    "not finite": ({f"{N}.lora_up.weight": normal(32, 4) * math.nan}, f"{N}.lora_up.weight holds values that are not finite"),
    "whole numbers": ({f"{N}.lora_up.weight": torch.ones(32, 4, dtype=torch.int8)}, f"{N}.lora_up.weight: torch.int8; it has to be"),
    "shape": ({f"{N}.lora_up.weight": normal(31, 4)}, r"q_proj is \(32, 32\) \(out, in\) in the base, \(31, 32\) in the patch"),
    "alpha of two": ({f"{N}.alpha": torch.ones(2)}, rf"{N}.alpha: torch.float32 of shape \(2,\); it has to be one number"),
    "negative alpha": ({f"{N}.alpha": torch.tensor(-1.0)}, f"{N}.alpha is -1.0; it has to be a positive number"),
    "complex alpha": (
        {f"{N}.alpha": torch.tensor(1j)},
        rf"{N}.alpha: torch.complex64 of shape \(\); it has to be one number",
    ),
    "rank": (
        {f"{N}.lora_up.weight": normal(32, 8193), f"{N}.lora_down.weight": normal(8193, 32)},
        r"lora_down.weight: rank 8193, 8192 is allowed \(Caps.rank\)",
    ),
    "endless alpha": ({f"{N}.alpha": torch.tensor(math.inf)}, f"{N}.alpha is inf; it has to be a positive number"),
    "unknown layer": (
        {"lora_te_model_layers_9_self_attn_q_proj.lora_up.weight": normal(32, 4), "lora_te_model_layers_9_self_attn_q_proj.lora_down.weight": normal(4, 32)},
        "no linear layer of .* flattens to model_layers_9_self_attn_q_proj. Nearest: 'model_layers_",
    ),
    "dora": ({f"{N}.dora_scale": normal(1, 32)}, f"{N}.dora_scale: DoRA, which this conversion cannot express; the program"),
    "tucker": ({f"{N}.lora_mid.weight": normal(4, 4, 3, 3)}, r"lora_mid.weight: LoRA with a third factor \(Tucker\)"),
    "bias": ({f"{N}.lora_up.bias": normal(32)}, "lora_up.bias: LoRA with a bias of its own"),
    "difference": ({f"{N}.diff_b": normal(32)}, "diff_b: a full difference"),
    "unknown": ({f"{N}.surprise": normal(32)}, "surprise: a tensor this format does not have; it has .lora_down.weight"),
    "mixture": ({"a.b.lora_A": normal(4, 4), "a.b.lora_B": normal(4, 4)}, "a mixture of formats: a.b.lora_A is of loralib, lora_te_.* is of kohya"),
    "no prefix": ({"lora_what_x.lora_up.weight": normal(4, 4)}, "lora_what_x.lora_up.weight: none of lora_unet_, "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_KOHYA)
def test_a_bad_kohya_file_is_refused_by_name(tmp_path: Path, base: Path, case: str) -> None:
    changes, message = BAD_KOHYA[case]
    refused(tmp_path, kohya_file(tmp_path / "k.safetensors", **changes), message, base=base)


def refused(folder: Path, source: Path, message: str, **options: Any) -> None:
    """Check that the conversion is refused with the message and leaves nothing."""
    before = sorted(folder.iterdir())
    with pytest.raises(PatchError, match=message):
        convert(source, target_path(folder, options.get("to", "peft")), **options)
    assert sorted(folder.iterdir()) == before


class Unclear(torch.nn.Module):
    """``a.b_c`` and ``a_b.c`` are both a_b_c; so would be ``x.y`` and an embedding, on which kohya has no adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.ModuleDict({"b_c": torch.nn.Linear(4, 4)})
        self.a_b = torch.nn.ModuleDict({"c": torch.nn.Linear(4, 4)})
        self.x = torch.nn.ModuleDict({"y": torch.nn.Linear(4, 4)})
        self.x_y = torch.nn.Embedding(4, 4)


def test_kohyas_names_need_the_base_and_have_to_be_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        tmp_path, kohya_file(tmp_path / "k.safetensors"), r"names are flattened .* name it \(--base, in Python base=\)"
    )
    for name in ("a.b_c", "a_b.c", "x.y"):
        monkeypatch.setitem(SIZES, name, (4, 4))
    both = write(tmp_path / "both", {"a.b_c": layer("a.b_c"), "a_b.c": layer("a_b.c")})
    one, clear = write(tmp_path / "one", {"a.b_c": layer("a.b_c")}), write(tmp_path / "clear", {"x.y": layer("x.y")})
    refused(tmp_path, both, "a.b_c and a_b.c are both a_b_c in kohya's names", to="kohya")

    options, origin = Options(Base("unclear", None, BaseShapes.of(Unclear()), ())), ConversionSource("peft", "")
    with pytest.raises(PatchError, match="one: a.b_c and a_b.c are both a_b_c in kohya's names"):
        write_kohya(tmp_path / "no.safetensors", read_patch(one), options, origin)
    without_base = convert(one, tmp_path / "one.safetensors", to="kohya")
    with pytest.raises(PatchError, match="one.safetensors: lora_te_a_b_c: several layers of unclear: a.b_c, a_b.c"):
        read_kohya(open_tensors(without_base), options)
    write_kohya(tmp_path / "clear.safetensors", read_patch(clear), options, origin)
    assert read_kohya(open_tensors(tmp_path / "clear.safetensors"), options).pairs.keys() == {"x.y"}


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BAD_DIFFUSERS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({f"{Q}.lora_magnitude_vector": normal(32)}, "q_proj.lora_magnitude_vector: DoRA"),
    "bias": ({f"{Q}.lora_B.bias": normal(32)}, "q_proj.lora_B.bias: LoRA with a bias of its own"),
    "embedding": ({"m.lora_embedding_A": normal(4, 9)}, "m.lora_embedding_A: an embedding's update"),
    "half": ({A: None}, r"q_proj.* the other half of .*q_proj \(lora_A\) is missing"),
    "twice": ({f"{Q}.lora.down.weight": normal(4, 32)}, "are the same part of one layer"),
    "some alphas": ({f"{Q}.alpha": None}, "q_proj has no alpha, and others have one"),
    "zero alpha": ({f"{Q}.alpha": torch.tensor(0.0)}, "q_proj.alpha is zero, and so is the scale"),
    "both": ({"header": {"r": 4}}, "alpha: the header has a LoraConfig too"),
    "other rank": ({"alpha": None, "header": {"r": 8}}, "rank 4, and the header says 8"),
    "use_dora": ({"alpha": None, "header": {"r": 4, "use_dora": True}}, "magnitudes of DoRA"),
    "modules": ({"alpha": None, "header": {"r": 4, "modules_to_save": ["x"]}}, "modules_to_save names"),
    "header": ({"alpha": None, "header": [1]}, "lora_adapter_metadata in the header is not a mapping"),
    "two": ({"alpha": None, "header": {"unet.r": 4, "text_encoder.r": 4}}, r"\(text_encoder, unet\); say which one's"),
    "ranks": ({"alpha": None, A: normal(2, 32), B: normal(32, 2)}, r"layers of ranks \[2, 4\] and no alpha"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DIFFUSERS)
def test_a_bad_diffusers_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, message = BAD_DIFFUSERS[case]
    refused(tmp_path, diffusers_file(tmp_path / "d.safetensors", **changes), message)


def test_a_header_of_another_component_is_refused(tmp_path: Path) -> None:
    file = diffusers_file(tmp_path / "d.safetensors", prefix="unet.", alpha=None, header={"transformer.r": 4})
    refused(tmp_path, file, "in the header says nothing of 'unet.'", prefix="unet")


BAD_MLX: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"config": {"fine_tune_type": "dora"}}, "fine_tune_type: 'dora'; only 'lora' has a place"),
    "full": ({"config": {"fine_tune_type": "full"}}, "fine_tune_type: 'full'"),
    "old": ({"config": {"num_layers": None, "lora_layers": 4}}, r"num_layers is not there \(lora_layers is of a time"),
    "no parameters": ({"config": {"lora_parameters": None}}, "lora_parameters is not there"),
    "rank": ({"parameters": {"rank": 4}}, "down_proj: rank 8, and .*adapter_config.json says 4 for all layers"),
    "no rank": ({"parameters": {"rank": None}}, "lora_parameters.rank must be a positive whole number, got None"),
    "scale": ({"parameters": {"scale": -1.0}}, "lora_parameters.scale must be a positive number, got -1.0"),
    "dropout": ({"parameters": {"dropout": "x"}}, "lora_parameters.dropout must be a number, got 'x'"),
    "keys": ({"parameters": {"keys": "q_proj"}}, "lora_parameters.keys must be a list of names"),
    "not applied": ({"parameters": {"keys": ["self_attn.v_proj"]}}, "does not name mlp.down_proj in lora_parameters.keys, so mlx-lm"),
    "other layers": (
        {f"{Q}.lora_a": normal(32, 8), f"{Q}.lora_b": normal(8, 32)},
        "layers.0.self_attn.q_proj: .* says the last 1 of at least 2 layers, so mlx-lm would not apply it",
    ),
    "outside": ({"lm_head.lora_a": normal(32, 8), "lm_head.lora_b": normal(8, 9)}, "lm_head is not below "),
    "another stack": ({"vision.layers.0.q.lora_a": normal(4, 8), "vision.layers.0.q.lora_b": normal(8, 4)}, "is not below vision.layers.N., and mlx-lm adapts nothing else"),
    "magnitude": ({f"{V}.m": normal(16)}, "v_proj.m: a tensor this format does not have"),
    "experts": ({f"{V}.lora_a": normal(2, 32, 8)}, r"lora_a: shape \(2, 32, 8\) is not that of a matrix"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MLX)
def test_a_bad_mlx_folder_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, message = BAD_MLX[case]
    refused(tmp_path, mlx_folder(tmp_path / "mlx", **changes), message)


def test_mlx_has_only_what_is_below_its_layers(tmp_path: Path, base: Path) -> None:
    refused(
        tmp_path,
        make_patch(base, tmp_path / "patch", targets=["lm_head"]),
        "patch: lm_head is not below layers.N.",
        to="mlx",
    )
    none = {f"{name}.lora_{half}": None for name in (V, DOWN) for half in "ab"}
    first = {f"{Q}.lora_a": normal(32, 8), f"{Q}.lora_b": normal(8, 32)}
    only_first = mlx_folder(tmp_path / "first", **(first | none))  # of two layers, and mlx-lm adapts the last
    assert len(read_patch(convert(only_first, tmp_path / "unknown")).layers) == 1
    refused(tmp_path, only_first, "q_proj: .* says the last 1 of at least 2 layers", base=base)
    inner = {f"model.layers.0.mixer.layers.7.q.lora_{half}": normal(8, 8) for half in "ab"}
    nested = mlx_folder(tmp_path / "nested", parameters={"keys": ["mixer.layers.7.q"]}, **(inner | none))
    assert len(read_patch(convert(nested, tmp_path / "nested_patch")).layers) == 1
    folder = mlx_folder(tmp_path / "mlx")
    (folder / "adapter_config.json").unlink()
    refused(tmp_path, folder, "adapter_config.json: no such file; mlx-lm writes it beside adapters.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"h.0.lora_A": normal(8, 4), "h.0.lora_B": normal(12, 4)}, "h.0.lora_A has rank 8 and h.0.lora_B has rank 4"),  # MergedLinear
        ({"h.0.lora_A": normal(4, 4), "h.0.lora_B": normal(4, 4), "head.weight": normal(4, 4)}, "head.weight: a tensor this format"),
        ({"h.0.lora_A": normal(4, 4)}, r"the other half of h.0 \(lora_B\) is missing"),
        ({"lora_te_x.hada_w1_a": normal(4, 4), "lora_te_x.alpha": normal()}, "lora_te_x.hada_w1_a: LoHa"),
        ({"lora_te_x.lokr_w1": normal(4, 4), "lora_te_x.alpha": normal()}, "lora_te_x.lokr_w1: LoKr"),
        ({"weight": normal(4, 4)}, "weight: a tensor this format does not have; it has .lora_A.weight"),
        ({"base_model.model.q.lora_A.weight": normal(4, 4)}, "an adapter of peft is a folder with adapter_config.json"),
        ({"model.layers.0.q.lora_a": normal(4, 4)}, "an adapter of mlx is a folder with adapter_config.json"),
        ({}, "x.safetensors: holds no tensors"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plain_adapter_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    refused(tmp_path, tmp_path / "x.safetensors", message)


def test_every_option_that_would_be_ignored_is_refused(tmp_path: Path, base: Path) -> None:
    patch, file = write(tmp_path / "patch", {Q: layer(Q)}), diffusers_file(tmp_path / "d.safetensors")
    loralib = loralib_file(tmp_path / "l.safetensors")
    refused(tmp_path, patch, "to: this is a peft adapter already")
    refused(tmp_path, file, "alpha: diffusers adapters hold their own; leave it out", alpha=3)
    refused(tmp_path, loralib, "alpha: must be a positive number, got 0", alpha=0)
    refused(tmp_path, loralib, "prefix: neither loralib nor peft adapters have one", alpha=3, prefix="x")
    refused(tmp_path, file, "revision: 'main' of no base", revision="main")
    with pytest.raises(PatchError, match="to: 'koya' is none of peft, kohya, .* Nearest: 'kohya'."):
        convert(patch, tmp_path / "out", to="koya")
    with pytest.raises(BaseModelError, match="'builtin:tony' is not built in. Nearest: 'builtin:tiny'"):
        convert(file, tmp_path / "out", base="builtin:tony")
    with pytest.raises(
        PatchError, match="out: .*out: an adapter of kohya is one file; let its name end in .safetensors"
    ):
        convert(patch, tmp_path / "out", to="kohya")
    with pytest.raises(PatchError, match="out.safetensors: an adapter of mlx is a folder"):
        convert(patch, tmp_path / "out.safetensors", to="mlx")


def test_a_result_that_does_not_fit_the_base_is_refused(tmp_path: Path) -> None:
    patch = write(tmp_path / "patch", {Q: layer(Q)})
    for to in FOREIGN:
        refused(tmp_path, patch, "does not fit builtin:tiny .*: 1 of 1 places", to=to, base="builtin:tiny")
    refused(
        tmp_path,
        diffusers_file(tmp_path / "d.safetensors"),
        "d.safetensors: does not fit builtin:tiny",
        base="builtin:tiny",
    )


@pytest.mark.parametrize("to", FORMATS)
def test_an_existing_target_is_never_overwritten(tmp_path: Path, to: str) -> None:
    source = diffusers_file(tmp_path / "d.safetensors") if to == "peft" else write(tmp_path / "patch", {Q: layer(Q)})
    out = target_path(tmp_path, to)
    out.write_text("mine")
    with pytest.raises(PatchError, match="exists already; choose another name"):
        convert(source, out, to=to)
    assert out.read_text() == "mine"
    out.unlink()
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PatchError, match="exists already"):
        convert(source, out, to=to)


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_leaves_nothing_and_the_same_call_goes_through_later(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = diffusers_file(tmp_path / "d.safetensors") if to == "peft" else write(tmp_path / "patch", {Q: layer(Q)})
    before, fsync = sorted(tmp_path.iterdir()), os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TemporaryFailure, match="the disk is full"):
        convert(source, target_path(tmp_path, to), to=to)
    assert sorted(tmp_path.iterdir()) == before

    monkeypatch.setattr(os, "fsync", fsync)
    first = convert(source, target_path(tmp_path, to, "first"), to=to)
    second = convert(source, target_path(tmp_path, to, "second"), to=to)
    assert tensor_file(first).read_bytes() == tensor_file(second).read_bytes()  # the same bytes every time
    assert not list(tmp_path.rglob(".*"))


def test_a_folder_with_one_tensor_file_is_enough_and_others_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(tmp_path, folder, "folder: not an adapter: no safetensors file")
    diffusers_file(folder / "pytorch_lora_weights.safetensors")
    assert_same(convert(folder, tmp_path / "1"), convert(folder / "pytorch_lora_weights.safetensors", tmp_path / "2"))
    diffusers_file(folder / "another.safetensors")
    refused(tmp_path, folder, "another.safetensors, pytorch_lora_weights.safetensors; name the file that is meant")
    both = mlx_folder(tmp_path / "both")
    save_file({"x": normal(1)}, both / TENSORS)
    refused(tmp_path, both, "holds adapter_model.safetensors of PEFT and adapters.safetensors of mlx-lm")
    refused(tmp_path, tmp_path / "absent.safetensors", "absent.safetensors: no such file")


@pytest.mark.parametrize("name", ["lora.pt", 'it\'s $(touch gone) "x".ckpt'])
def test_a_pickle_is_refused_with_the_command_that_rewrites_it(tmp_path: Path, name: str) -> None:
    tensors = {f"{Q}.lora_A": normal(4, 32), f"{Q}.lora_B": normal(32, 4)}
    (tmp_path / "in").mkdir()
    torch.save(tensors, tmp_path / "in" / name)
    for source in (tmp_path / "in" / name, tmp_path / "in"):
        with pytest.raises(
            PatchError, match="a pickle, which can run code when it is opened. Where you trust it"
        ) as error:
            convert(source, tmp_path / "out", alpha=4)

    command = str(error.value).splitlines()[1]
    program = command.strip().replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", program], cwd=tmp_path / "in", check=True)

    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == sorted([name, f"{Path(name).stem}.safetensors"])
    patch = read_patch(convert(tmp_path / "in" / f"{Path(name).stem}.safetensors", tmp_path / "out", alpha=4))
    assert bits(patch.layers[Q].tensors["lora_A"]) == bits(tensors[f"{Q}.lora_A"])


def test_damaged_facts_are_refused(tmp_path: Path) -> None:
    file = loralib_file(tmp_path / "l.safetensors")
    for text in ("{", "[" * 5000, '"x"', "3"):
        save_file(load_file(file), file, metadata={"lorakit": text})
        refused(tmp_path, file, "lorakit's own facts in the metadata are damaged|does not hold its alpha")


# Properties.


@given(scale=st.floats(1e-6, 1e6), rank=st.integers(1, 300))
@settings(deadline=None, max_examples=300)
def test_an_alpha_gives_its_scale_bit_for_bit_or_there_is_none(scale: float, rank: int) -> None:
    found = exact_alpha(scale, rank)
    if found is not None:
        assert METHODS[found[0]].scale(found[1], rank) == scale
        return
    for method in (METHODS[name] for name in PLAIN):
        alpha = scale / method.scale(1.0, rank)
        for _ in range(20):
            alpha = math.nextafter(alpha, 0.0)
        for _ in range(40):
            assert method.scale(alpha, rank) != scale
            alpha = math.nextafter(alpha, math.inf)


@given(alpha=st.integers(1, 4096), rank=st.integers(1, 512))
def test_the_shortest_alpha_is_returned(alpha: int, rank: int) -> None:
    assert exact_alpha(alpha / rank, rank) == ("lora", alpha)


def test_a_scale_of_mlx_that_no_alpha_gives_is_refused_with_the_nearest(tmp_path: Path) -> None:
    scale = next(s for s in (1.9 + i * 1e-3 for i in range(10_000)) if exact_alpha(s, 3) is None)
    tensors = {
        f"{V}.lora_a": normal(32, 3),
        f"{V}.lora_b": normal(3, 16),
        f"{DOWN}.lora_a": None,
        f"{DOWN}.lora_b": None,
    }
    folder = mlx_folder(tmp_path / "mlx", parameters={"rank": 3, "scale": scale}, **tensors)
    refused(
        tmp_path, folder, rf"scale {scale!r}: no alpha gives it at rank 3, bit for bit; the nearest that has one is"
    )

    nearest = scale * 3 / 3
    close = mlx_folder(tmp_path / "close", parameters={"rank": 3, "scale": nearest}, **tensors)
    assert read_patch(convert(close, tmp_path / "patch")).layers[V].scale == nearest


BYTES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Draw any finite values: negative zeros, subnormals, the largest."""
    integer = BYTES[dtype]
    limits = torch.iinfo(integer)
    values = torch.randint(limits.min, limits.max, shape, dtype=integer).view(dtype)
    return torch.where(torch.isfinite(values), values, torch.tensor(-0.0, dtype=dtype))


NAMES = st.lists(
    st.sampled_from(["a", "lora", "q_proj", "B", "h", "0", "12", "é", "x-y", "weight", "alpha"]), min_size=1, max_size=4
).map(".".join)
MODULE_NAMES = st.one_of(NAMES, NAMES.map(lambda name: f"model.layers.3.{name}"))


@st.composite
def layer_sets(draw: Callable[..., Any], names: Any) -> dict[str, PatchLayer]:
    method = draw(st.sampled_from(PLAIN))
    alphas = draw(st.sampled_from([[8], [1, 2, 0.5, 16, 24.0], [0.1, 7, 1 / 3]]))
    ranks = draw(st.sampled_from([[4], [1, 4, 16], [1, 3, 5, 8]]))
    torch.manual_seed(draw(st.integers(0, 9)))
    layers = {}
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        out, wide = SIZES.get(name) or (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        rank, alpha = draw(st.sampled_from(ranks)), draw(st.sampled_from(alphas))
        dtypes = [draw(st.sampled_from(sorted(BYTES, key=str))) for _ in range(2)]
        tensors = {"lora_A": any_bits(dtypes[0], rank, wide), "lora_B": any_bits(dtypes[1], out, rank)}
        layers[name] = PatchLayer(method, rank, alpha, (out, wide), tensors)
    return layers


def assert_round_trip(folder: Path, layers: Mapping[str, PatchLayer], to: str, **options: Any) -> bool:
    """Check a round trip with lorakit's metadata and without; False if the conversion is refused."""
    patch = write(folder / "patch", layers)
    try:
        there = convert(patch, target_path(folder, to), to=to)
    except PatchError as problem:
        assert any(name in str(problem) for name in layers), problem
        assert to != "diffusers"
        assert not target_path(folder, to).exists()
        return False
    reads = options | ({"prefix": ""} if to == "diffusers" else {})
    assert_same(patch, convert(there, folder / "back", **reads))
    strip(tensor_file(there))
    if to == "loralib":
        found = {exact_alpha(x.scale, x.rank, ["lora"]) for x in layers.values()}
        reads["alpha"] = (
            layers[next(iter(layers))].alpha if all(x.method == "lora" for x in layers.values()) else found.pop()[1]
        )  # type: ignore[index]
    assert_same(patch, convert(there, folder / "again", **reads))
    return True


@given(layers=layer_sets(MODULE_NAMES))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("to", ["diffusers", "loralib", "mlx"])
def test_any_patch_comes_back_the_same_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, to: str, layers: dict[str, PatchLayer]
) -> None:
    assert_round_trip(tmp_path_factory.mktemp("any"), layers, to)


@given(layers=layer_sets(st.sampled_from(sorted(SIZES))))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_any_patch_comes_back_from_kohya_the_same_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, base: Path, layers: dict[str, PatchLayer]
) -> None:
    assert_round_trip(tmp_path_factory.mktemp("any"), layers, "kohya", base=base)
