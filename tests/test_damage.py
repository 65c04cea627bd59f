"""Files whose bits flipped, or that were cut, are detected, or give what sound ones give; and so do killed commands.

`make attack` draws 1,000 damaged files and 200 kills, and prints for each kind how many were detected and how many had
no effect, and how many commands were still at work when they were killed.
"""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lorakit
from lorakit import LorakitError
from lorakit.base.find import find_base
from lorakit.base.from_recipe import load_recipe_tokenizer
from lorakit.data.load import load_datasets
from lorakit.errors import TemporaryFailure
from lorakit.patch import read_patch
from lorakit.recipe import load_recipe
from lorakit.run.display import row_progress
from lorakit.run.facts import read_run
from tests.helpers.fork_server import DEVNULL, run_python, start_python
from tests.helpers.patches import make_patch
from tests.helpers.training import stop_at, train

pytestmark = pytest.mark.attack

IDS = torch.tensor([[5, 9, 31, 7, 12, 44]])
SHARE_OF_FLIPS = 0.65
Read = Callable[[Path], Any]
Known = Callable[[str, int], bool]


def damaged(content: bytes, draw: random.Random) -> tuple[int, str, bytes]:
    """One bit of a file flipped, or the file cut; with the first byte that is another."""
    if draw.random() < SHARE_OF_FLIPS:
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        flipped = bytes([content[place] ^ 1 << bit])
        return place, f"bit {bit} of byte {place}", content[:place] + flipped + content[place + 1 :]
    size = draw.randrange(len(content))
    return size, f"cut to {size} bytes", content[:size]


def assert_no_damage_is_silent(
    sound: Path, read: Read, number: int, folder: Path, files: str = "**/*", *, known: Known = lambda name, place: False
) -> None:
    """Damage one file of a folder after another, and read the folder each time.

    known: (file, byte) -> True where nothing says what the byte was.
    """
    draw = random.Random(7)
    expected = read(shutil.copytree(sound, folder / "sound"))
    names = sorted(path.relative_to(sound) for path in sound.glob(files) if path.is_file() and path.stat().st_size)
    outcomes, silent = Counter[str](), []
    for index in range(number):
        name = names[index % len(names)]
        copy = shutil.copytree(sound, folder / f"damaged-{index}")
        place, what, content = damaged((copy / name).read_bytes(), draw)
        (copy / name).write_bytes(content)
        try:
            seen = "not recorded" if known(str(name), place) else "SILENT"
            outcome = "no effect" if read(copy) == expected else seen
        except LorakitError:
            outcome = "detected"
        outcomes[outcome] += 1
        if outcome == "SILENT":
            silent.append(f"{name}: {what}")
        shutil.rmtree(copy)
    print(f"{number} damaged files: {dict(outcomes)}")
    assert not silent, "\n".join(silent)


def logits(base: Path, patch: Path | None) -> bytes:
    model = lorakit.load(base, {} if patch is None else {"a": patch}, dtype="float32", device="cpu")
    with torch.no_grad():
        return bytes(model(IDS, adapters=None if patch is None else "a").logits.numpy().tobytes())


def test_a_patch(base: Path, tmp_path: Path) -> None:
    patch = make_patch(base, tmp_path / "patch", rank=4)
    assert_no_damage_is_silent(patch, lambda folder: logits(base, folder), 200, tmp_path)


def test_a_merged_model(base: Path, tmp_path: Path) -> None:
    merged = lorakit.merge(base, make_patch(base, tmp_path / "patch", rank=4), out=tmp_path / "merged")
    assert_no_damage_is_silent(merged, lambda folder: logits(folder, None), 200, tmp_path)


def test_the_base_of_a_patch(base: Path, tmp_path: Path) -> None:
    """A patch has digests of the weights that it adapts, and of no others."""
    patch = make_patch(base, tmp_path / "patch", rank=4)
    weights = (base / "model.safetensors").read_bytes()
    first = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:first])
    adapted = {f"{name}.weight" for name in read_patch(patch).layers}
    others = [entry["data_offsets"] for name, entry in header.items() if name not in {*adapted, "__metadata__"}]
    assert len(others) < len(adapted)

    def is_of_another(name: str, place: int) -> bool:
        return name == "model.safetensors" and any(start <= place - first < stop for start, stop in others)

    assert_no_damage_is_silent(base, lambda folder: logits(folder, patch), 200, tmp_path, known=is_of_another)


def test_the_token_cache(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe(recipe())
    tokenizer = load_recipe_tokenizer(loaded, find_base(loaded.base.model))

    def read(cache: Path) -> Any:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        rows = load_datasets(loaded, tokenizer, row_progress)["train"]
        return rows.digest, [(rows.ids(row).tolist(), rows.label_mask(row).tolist()) for row in range(len(rows))]

    read(tmp_path / "cache")
    assert_no_damage_is_silent(tmp_path / "cache", read, 150, tmp_path)


def test_the_record_of_a_finished_run(recipe: Any, tmp_path: Path) -> None:
    out, _ = train(recipe(train={"steps": 4}))

    def read(folder: Path) -> Any:
        run = read_run(folder)
        if run.damage:
            raise LorakitError(run.damage)  # as `show` says it
        return run.lines, run.record, run.patch_step

    assert_no_damage_is_silent(out, read, 100, tmp_path, "*.json*")


def test_what_an_interrupted_run_goes_on_from(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    path = recipe(train={"steps": 4, "save_every_steps": 1}, output=str(out))
    stop_at(monkeypatch, {3})
    with pytest.raises(TemporaryFailure):
        train(path)
    interrupted = out.rename(tmp_path / "interrupted")

    def read(folder: Path) -> bytes:
        folder.rename(out)
        try:
            train(path)
            return (out / "adapter_model.safetensors").read_bytes()
        finally:
            out.rename(folder)

    assert_no_damage_is_silent(interrupted, read, 150, tmp_path)


@pytest.mark.parametrize("command", ["train", "merge"])
def test_a_command_that_was_killed_at_any_moment_ends_as_if_it_was_not(
    command: str, base: Path, recipe: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if command == "train":
        arguments = ["train", recipe(train={"steps": 6, "save_every_steps": 1}, output=str(out))]
    else:
        arguments = ["merge", base, make_patch(base, tmp_path / "patch", rank=4), "--out", out]

    def run_to_the_end() -> bytes:
        ended = run_python("-m", "lorakit.cli", *arguments, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        written = next(out.glob("*model.safetensors")).read_bytes()
        shutil.rmtree(out)
        return written

    run_to_the_end()  # fills the caches
    began = time.monotonic()
    expected = run_to_the_end()
    seconds = time.monotonic() - began
    beside = {path.name for path in tmp_path.iterdir()}
    draw, num_killed = random.Random(3), 0
    for _ in range(100):
        process = start_python("-m", "lorakit.cli", *arguments, cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL)
        time.sleep(draw.uniform(0, seconds))
        num_killed += process.poll() is None
        process.kill_group()
        process.wait()
        if command == "merge" and out.exists():  # had ended: a merge refuses a folder that exists
            shutil.rmtree(out)
        assert run_to_the_end() == expected
    assert {path.name for path in tmp_path.iterdir()} == beside
    print(f"100 kills of {command}: {num_killed} while it was at work, all ended in the same bytes")
    assert num_killed > 50
