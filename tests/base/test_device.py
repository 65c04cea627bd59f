"""The device of a machine: GPUs that torch has are used, and those that no test has run on are named."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakit.base import device
from lorakit.base.device import device_type, find_gpus
from lorakit.errors import RunError
from lorakit.files.atomic import measured_once
from lorakit.launch.environment import World, detect_world
from lorakit.ops._internals import has_onednn_linear
from lorakit.parallel import open_engine
from lorakit.parallel.setup import device_of
from lorakit.recipe import ParallelSection
from tests.helpers.ranks import as_rank

WINDOWS = """
import sys
class NotThere:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotThere())
import lorakit
lorakit.load_recipe  # needs nothing that Windows lacks; before the next line, as pydantic looks at the platform
sys.platform = "win32"
try:
    lorakit.train
except lorakit.LorakitError as problem:
    print("train:", problem)
from lorakit.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU of CUDA goes first")
@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_gpus_of_apple_and_intel_are_used_in_one_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)

    assert device_type() == kind
    assert find_gpus() == [torch.device(kind, 0)]
    assert device_of(0) == open_engine(ParallelSection()).device == torch.device(kind, 0)
    with pytest.raises(RunError, match="local rank 1 has no GPU, this machine has 1"):
        device_of(1)
    world = detect_world(as_rank(0, 2, 1234))
    assert isinstance(world, World)
    with pytest.raises(
        RunError, match=f"parallel.backend: ddp sends between .* and this machine has {kind}; choose single"
    ):
        open_engine(ParallelSection(backend="ddp", processes=2), world)


@pytest.mark.parametrize("kind", ["cpu", "mtia", None])
def test_other_accelerators_are_left_alone(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    assert (device_type(), find_gpus(), device_of(3)) == ("cpu", [], torch.device("cpu"))


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--version"], 0), (["check", "recipe.yaml"], 2)])
def test_on_windows_help_is_there_and_commands_end_in_one_sentence(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, "-c", WINDOWS, *arguments], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == code
    assert "train: Windows lacks what lorakit needs" in done.stdout
    if code:
        assert done.stderr.startswith("lorakit check: Windows lacks what lorakit needs")
        assert done.stderr.count("\n") == 1
        assert done.stderr.rstrip().endswith("run it in WSL, which is Linux")
    else:
        assert done.stderr == ""


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """Library -> seconds of a product on a machine of its own, in which these may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock, costs = [0.0], {"torch": 1.0, "onednn": 0.8, "prepacked": 0.5}

    def product(name: str) -> Any:
        def multiply(x: torch.Tensor, weight: torch.Tensor, bias: None) -> None:
            clock[0] += costs["prepacked" if weight.is_mkldnn else name]

        return multiply

    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(device.F, "linear", product("torch"))
    monkeypatch.setattr(device, "onednn_linear", product("onednn"))
    return costs


has_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this torch is built without oneDNN")


@has_onednn
@pytest.mark.parametrize(("seconds", "chosen"), [(0.8, "onednn"), (0.95, "torch")])
def test_a_trial_takes_what_is_faster(costs: dict[str, float], seconds: float, chosen: str) -> None:
    costs["onednn"] = seconds
    assert device.training_products(torch.float32, torch.device("cpu")) == chosen
    assert device.training_products(torch.bfloat16, torch.device("cpu")) == "torch"
    assert device.decoding_products(torch.nn.Linear(512, 512)) == chosen


@has_onednn
@pytest.mark.parametrize(("seconds", "chosen"), [(0.7, "prepacked"), (0.75, "onednn")])
def test_weights_are_copied_only_where_that_gains_much(costs: dict[str, float], seconds: float, chosen: str) -> None:
    costs["prepacked"] = seconds
    assert device.decoding_products(torch.nn.Linear(512, 512), prepack=True) == chosen
    assert device.decoding_products(torch.nn.Linear(512, 512)) == "onednn"


@has_onednn
def test_every_run_on_a_machine_chooses_what_the_first_one_measured(costs: dict[str, float], tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert device.training_products(torch.float32, cpu) == "onednn"
    costs["onednn"] = 2.0  # another program disturbs
    assert device.training_products(torch.float32, cpu) == "onednn"
    for damaged in ("", "[]", '{"answer"'):
        for file in (tmp_path / "lorakit" / "measured").iterdir():
            file.write_text(damaged)
        assert device.training_products(torch.float32, cpu) == "torch"


def test_where_nothing_can_be_remembered_each_run_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    answers = iter((1, 2))
    assert [measured_once("a question", lambda: next(answers)) for _ in range(2)] == [1, 2]
