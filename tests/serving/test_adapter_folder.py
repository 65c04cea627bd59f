"""A watched folder of patches: what is complete is served, and nothing else."""

import itertools
import json
import math
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lorakit
from lorakit.errors import TemporaryFailure
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch import read_patch
from lorakit.serving import adapter_pool as adapter_pool_module
from lorakit.serving.adapter_pool import AdapterFolder, AdapterPool, files_of
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.http_server import serving
from tests.helpers.patches import TENSORS, make_patch, save_trained_peft, without_facts
from tests.helpers.serving import wait_until

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def patches(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {name: make_patch(base, folder / name, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def answers(base: Path, patches: dict[str, Path]) -> dict[str | None, str]:
    python = lorakit.load(base, patches, dtype="float32")
    return {name: answer(python, name) for name in (None, "one", "two")}


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def model(base: Path) -> AdaptedModel:
    return lorakit.load(base, dtype="float32")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


@pytest.fixture
def pool(model: AdaptedModel, lines: Lines) -> AdapterPool:
    return AdapterPool(model, log=lambda line: lines.append(dict(line)))


@pytest.fixture
def folder(pool: AdapterPool, root: Path, lines: Lines) -> AdapterFolder:
    return AdapterFolder(pool, root, {"tiny"})


def answer(model: AdaptedModel, name: str | None) -> str:
    return model.generate(["say hi"], name, max_new_tokens=8)[0]


def look(folder: AdapterFolder) -> None:
    """Look twice: a sub-folder is read when two looks see the same files."""
    folder.look()
    folder.look()


def test_a_folder_is_loaded_replaced_and_unloaded(
    folder: AdapterFolder,
    model: AdaptedModel,
    root: Path,
    lines: Lines,
    patches: dict[str, Path],
    answers: dict[str | None, str],
) -> None:
    shutil.copytree(patches["one"], root / "x")
    folder.look()
    assert model.adapters == ()  # it may be half of a copy
    folder.look()
    assert answer(model, "x") == answers["one"]
    identity = model.sources()["x"].identity

    look(folder)
    assert [line["event"] for line in lines] == ["adapter loaded"]  # nothing changed, so nothing is read

    shutil.rmtree(root / "x")
    shutil.copytree(patches["two"], root / "x")
    look(folder)
    assert answer(model, "x") == answers["two"]
    assert lines[-1] == {"event": "adapter replaced", "adapter": "x", "digest": model.sources()["x"].identity}
    assert model.sources()["x"].identity != identity

    shutil.rmtree(root / "x")
    folder.look()
    assert model.adapters == ("x",)  # between a rename and the next one
    folder.look()
    assert model.adapters == ()
    assert lines[-1] == {"event": "adapter unloaded", "adapter": "x", "digest": lines[-2]["digest"]}


def test_a_half_written_patch_is_said_and_the_old_one_stays(
    folder: AdapterFolder,
    pool: AdapterPool,
    model: AdaptedModel,
    root: Path,
    lines: Lines,
    patches: dict[str, Path],
    answers: dict[str | None, str],
) -> None:
    shutil.copytree(patches["one"], root / "x")
    look(folder)
    full = (patches["two"] / TENSORS).read_bytes()
    (root / "x" / TENSORS).write_bytes(full[: len(full) // 2])
    look(folder)
    look(folder)

    (refused,) = [line for line in lines if line["event"] == "adapter refused"]  # said once
    assert (refused["adapter"], refused["served"]) == ("x", True)
    assert str(root) not in refused["error"]
    assert list(pool.failed) == ["x"]
    assert answer(model, "x") == answers["one"]

    (root / "x" / TENSORS).write_bytes(full)  # of the other patch, whose digest is not in this sidecar
    look(folder)
    assert answer(model, "x") == answers["one"]
    for file in patches["two"].iterdir():
        shutil.copy(file, root / "x")
    look(folder)
    assert pool.failed == {}
    assert answer(model, "x") == answers["two"]


def test_a_start_reads_the_values_of_as_many_adapters_as_stay_in_memory(
    model: AdaptedModel, root: Path, lines: Lines, patches: dict[str, Path], answers: dict[str | None, str]
) -> None:
    for name, source in {
        "a": "one",
        "b": "one",
        "flipped": "one",
        "late": "two",
        "nan": "one",
        "pinned": "two",
    }.items():
        shutil.copytree(patches[source], root / name)
    flipped = bytearray((root / "flipped" / TENSORS).read_bytes())
    flipped[-1] ^= 1
    (root / "flipped" / TENSORS).write_bytes(flipped)
    (root / "nan" / "lorakit.json").unlink()  # as a patch of another program
    values = load_file(root / "nan" / TENSORS)
    values[min(values)].fill_(math.nan)
    save_file(values, root / "nan" / TENSORS)
    without_facts(patches["one"], root / "foreign", lambda facts: facts["base"].update(config="another"))
    pool = AdapterPool(model, 2, pinned=["pinned"], log=lambda line: lines.append(dict(line)))
    folder = AdapterFolder(pool, root, {"tiny"})

    look(folder)
    assert {*pool.names} == {"a", "b", "flipped", "late", "nan", "pinned"}
    assert pool.failed.keys() == {"foreign"}  # a header says so
    assert model.adapters == ("b", "pinned")
    assert pool.sources()["nan"].identity is None
    assert pool.sources()["late"].identity == read_patch(root / "late").identity

    for name, problem in (("flipped", "not the file that was saved"), ("nan", "not finite")):
        with pytest.raises(TemporaryFailure, match=problem):
            pool.adapter(name)
        assert problem in pool.failed[name]
        assert lines[-1] == {"event": "adapter refused", "adapter": name, "error": pool.failed[name]}
        assert str(root) not in pool.failed[name]
        assert pool.model.is_loaded("pinned")
    for name, config in (
        ("nan", {"lora_alpha": 99}),
        ("late", {"lora_alpha": 98}),
    ):  # of the next version, half written
        written = (root / name / "adapter_config.json").read_text()
        (root / name / "adapter_config.json").write_text(json.dumps(json.loads(written) | config))
        (root / name / TENSORS).write_bytes((patches["two"] / TENSORS).read_bytes())
        with pytest.raises(TemporaryFailure, match="changed|edited"):
            pool.adapter(name)
        (root / name / "adapter_config.json").write_text(written)
    look(folder)
    pool.adapter("late")
    assert (model.adapters, answer(model, "late")) == (("pinned", "late"), answers["two"])

    (root / "nan" / TENSORS).write_bytes((patches["one"] / TENSORS).read_bytes())
    shutil.copytree(patches["two"], root / "a", dirs_exist_ok=True)
    look(folder)
    assert model.adapters == ("pinned", "late")
    pool.adapter("nan")
    assert answer(model, "nan") == answers["one"]
    assert pool.sources()["nan"].identity == read_patch(root / "nan").identity
    pool.adapter("a")
    assert answer(model, "a") == answers["two"]


def test_files_that_change_while_they_are_read_are_read_once_more(
    folder: AdapterFolder, model: AdaptedModel, base: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_trained_peft(root / "x", base, r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")  # has no digest to check
    config = (root / "x" / "adapter_config.json").read_text()
    read = adapter_pool_module.read_patch

    def read_and_change(path: Path) -> Any:
        patch = read(path)
        (path / "adapter_config.json").write_text(config.replace('"lora_alpha": 8', '"lora_alpha": 16'))
        return patch

    folder.look()
    monkeypatch.setattr(adapter_pool_module, "read_patch", read_and_change)
    folder.look()
    assert model.adapters == ()
    monkeypatch.undo()
    look(folder)
    adapter = model.adapter("x")
    assert adapter is not None
    factors = {name: slot.factors for name, slot in adapter.slots.items()}
    for name, layer in read_patch(root / "x").layers.items():
        assert torch.equal(factors.pop(name).B.T, 16 / 4 * layer.tensors["lora_B"])
    assert not factors


def test_a_change_that_keeps_size_and_modification_time_is_seen(
    folder: AdapterFolder, model: AdaptedModel, root: Path, patches: dict[str, Path], answers: dict[str | None, str]
) -> None:
    shutil.copytree(patches["one"], root / "x")
    look(folder)
    for file in patches["two"].iterdir():
        time_before = (root / "x" / file.name).stat()
        (root / "x" / file.name).write_bytes(file.read_bytes())
        os.utime(root / "x" / file.name, ns=(time_before.st_atime_ns, time_before.st_mtime_ns))
    look(folder)
    assert answer(model, "x") == answers["two"]


def test_names_that_are_taken_other_files_and_staged_folders_are_not_loaded(
    folder: AdapterFolder, model: AdaptedModel, root: Path, lines: Lines, patches: dict[str, Path]
) -> None:
    model.load_adapter("mine", patches["two"])
    for name in ("tiny", "mine", " ", ".x.tmp-1", "good"):
        shutil.copytree(patches["one"], root / name)
    (root / "notes.txt").write_text("hello")
    (root / "empty").mkdir()
    (root / "link").symlink_to(patches["two"])
    (root / "broken").symlink_to(root / "nowhere")
    (root / "secret").mkdir(mode=0)
    look(folder)

    assert set(model.adapters) == {"mine", "good", "link"}
    assert model.sources()["mine"].folder == patches["two"]
    errors = {line["adapter"]: line["error"] for line in lines if line["event"] == "adapter refused"}
    assert "taken" in errors.pop("tiny")
    assert "taken" in errors.pop("mine")
    assert "adapter_config.json" in errors.pop("empty")
    assert "no space at its ends" in errors.pop(" ")
    assert set(errors) == {"secret"}


def test_a_folder_that_cannot_be_read_keeps_what_is_loaded(
    folder: AdapterFolder, pool: AdapterPool, model: AdaptedModel, root: Path, lines: Lines, patches: dict[str, Path]
) -> None:
    shutil.copytree(patches["one"], root / "x")
    look(folder)
    root.rename(root.with_name("away"))
    look(folder)
    look(folder)
    assert model.adapters == ("x",)
    assert [line["event"] for line in lines] == ["adapter loaded", "adapters-dir cannot be read"]
    root.with_name("away").rename(root)
    look(folder)
    assert model.adapters == ("x",)
    assert pool.failed == {}


def test_looks_take_a_twentieth_of_the_time_at_most(folder: AdapterFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    for seconds in (0, 0.5):
        clock = SimpleNamespace(monotonic=itertools.count(0.0, seconds).__next__)
        monkeypatch.setattr(adapter_pool_module, "time", clock)
        folder.look()
        waits.append(folder._wait)
    assert waits == [adapter_pool_module.POLL_SECONDS, 10.0]


def test_a_file_is_the_one_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for name, target in (("link", "file"), ("nothing", "gone"), ("circle", "circle")):
        (tmp_path / name).symlink_to(target)
    files = {name: (inode, size) for name, inode, size, _ in files_of(tmp_path)}
    assert list(files) == ["circle", "file", "link", "nothing"]
    assert files["link"] == files["file"]
    assert files["nothing"] == ((tmp_path / "nothing").lstat().st_ino, len("gone"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_pool_module, "POLL_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
def test_answers_under_changes_are_those_of_one_patch_or_the_other(
    folder: AdapterFolder,
    pool: AdapterPool,
    model: AdaptedModel,
    root: Path,
    patches: dict[str, Path],
    answers: dict[str | None, str],
) -> None:
    shutil.copytree(patches["one"], root / "x")
    shutil.copytree(patches["one"], root / "bad")
    (root / "bad" / TENSORS).write_bytes(b"half")
    folder.start()
    engine = ServingEngine(model)
    app = OpenAIServer(model, engine, "tiny", pool=pool).app
    body = {"model": "x", "messages": [{"role": "user", "content": "say hi"}], "temperature": 0, "max_tokens": 8}
    seen = set()
    over = threading.Event()

    def write() -> None:
        for number in range(1, 6):
            patch = patches["two" if number % 2 else "one"]
            for file in sorted(patch.iterdir()):  # in place, file by file
                (root / "x" / file.name).write_bytes(file.read_bytes())
            wanted = read_patch(patch).identity
            wait_until(lambda wanted=wanted: model.sources()["x"].identity == wanted)  # type: ignore[misc]
        over.set()

    writer = threading.Thread(target=write)
    with serving(app) as address:
        writer.start()
        while not over.is_set():
            seen.add(
                patient.post(f"{address}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            )
        writer.join()
        states = {one["name"]: one["state"] for one in patient.get(f"{address}/v1/adapters").json()["data"]}
    folder.close()
    engine.close()
    assert seen <= {answers["one"], answers["two"]}
    assert states == {"x": "loaded", "bad": "failed"}
