"""The device of a machine: GPUs that torch has are used, and those that no test has run on are named."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lorakit.base.device import device_type, find_gpus
from lorakit.errors import RunError
from lorakit.launch.environment import World, detect_world
from lorakit.parallel import open_engine
from lorakit.parallel.process_group import device_of
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
    with pytest.raises(RunError, match=f"parallel.backend: ddp sends between .* and this machine has {kind}; backend"):
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
