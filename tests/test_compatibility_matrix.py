"""docs/compatibility.md is what is found; and every cell of it, on every backend, trains what one process trains."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import chat, write_rows
from tests.helpers import compatibility
from tests.parallel.test_backends import launch

Found = dict[tuple[str, str], str | None]
CHOSEN = {  # what `make test` spreads over processes: every method, every kind, every target, not each with each
    ("nf4", "lora"), ("int8", "lora"), ("fp4", "rslora"), ("nf4 in its files", "dora"), ("nf4", "init: pissa"),
    ("floats", "rsdora"), ("floats", "lora_fa"), ("floats", "init: olora"), ("floats", "embedding"),
    ("floats, tied head", "embedding and head alike"), ("floats, tied head", "trainable_tokens"),
    ("floats", "trainable_tokens"), ("floats", "modules_to_save"), ("floats, Conv1D", "bias: all"),
    ("floats, experts", "target_parameters"), ("floats", "output head"),
}  # fmt: skip

RESUMED = [  # what lies in a checkpoint besides A and B: fixed starts, magnitudes, whole tensors, rows, experts
    ("nf4", "init: pissa"), ("floats", "lora_fa"), ("floats", "rsdora"), ("floats", "modules_to_save"),
    ("floats", "trainable_tokens"), ("floats, experts", "target_parameters"),
    ("floats, tied head", "embedding and head alike"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("support")
    compatibility.make_bases(folder, tokenizer)
    write_rows(folder / "rows.jsonl", [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(41)])
    return folder


@pytest.fixture(scope="module")
def tried(folder: Path) -> Found:
    return compatibility.found(folder)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # bitsandbytes' own, on CPUs
def test_the_page_is_what_is_found(tried: Found) -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(tried)
    works = [cell for cell, why in tried.items() if why is None and cell not in compatibility.NO_SENSE]
    assert len(works) > 60
    assert set(works) >= CHOSEN


@pytest.fixture(scope="module")
def alone(folder: Path, tried: Found) -> Callable[[bool], dict[str, Any]]:
    """What one process gives, run when first asked for."""

    def run(chosen: bool) -> dict[str, Any]:
        whole = [compatibility.cell(*at) | {"steps": 4, "parallel": {"backend": "single"}} for at in RESUMED]
        more = [case | {"name": f"{case['name']}-resumed"} for case in whole] if chosen else []
        found = launch(folder, 1, [*cases(tried, "single", chosen=chosen), *more])
        for at in RESUMED:
            torch.save(found[name := compatibility.cell(*at)["name"]], folder / f"{name}.pt")
        return found

    return functools.cache(run)


def resumed(folder: Path, backend: str) -> list[dict[str, Any]]:
    """Steps 3 and 4 of runs whose first two one process took, where nothing is as it starts."""
    started = [compatibility.cell(*at) for at in RESUMED]
    return [
        case | {"name": f"{case['name']}-resumed", "resume": str(folder / f"{case['name']}.pt"), "steps": 4}
        | {"parallel": {"backend": backend}}
        for case in started
    ]  # fmt: skip


def cases(tried: Found, backend: str, *, chosen: bool) -> list[dict[str, Any]]:
    ahead = {"prefetch_mb": 0.0} if backend == "zero3" else {}  # so small a base would all be fetched ahead
    return [
        compatibility.cell(*at) | {"steps": 2, "parallel": {"backend": backend, **ahead}}
        for at, why in tried.items()
        if why is None and at not in compatibility.NO_SENSE and (not chosen or at in CHOSEN)
    ]


@pytest.mark.spread
@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        *((backend, True) for backend in ("zero3", "fsdp2")),
        *(pytest.param(backend, True, marks=pytest.mark.attack) for backend in ("ddp", "zero2")),
        *(pytest.param(backend, False, marks=pytest.mark.attack) for backend in compatibility.BACKENDS[1:]),
    ],
)
def test_two_processes_train_what_one_does(
    backend: str, chosen: bool, folder: Path, tried: Found, alone: Callable[[bool], dict[str, Any]]
) -> None:
    expected_of = alone(chosen)
    found = launch(folder, 2, [*cases(tried, backend, chosen=chosen), *(resumed(folder, backend) if chosen else [])])

    for name, got in found.items():
        expected = expected_of[name]
        assert got["unreached"] == []
        losses = torch.tensor(expected["losses"][-len(got["losses"]) :])
        torch.testing.assert_close(torch.tensor(got["losses"]), losses, rtol=2e-5, atol=0)
        assert got["adapter"].keys() == expected["adapter"].keys()
        for key, tensor in expected["adapter"].items():
            if key.endswith("c_attn.bias"):
                continue  # a third of it has no gradient but rounding, as keys may be shifted; Adam makes steps of it
            differs = (got["adapter"][key] - tensor).abs() > 2e-5 + 2e-3 * tensor.abs()
            assert differs.float().mean() < 1e-3, f"{name}: {key}"  # a gradient near zero may round to either sign
    packed = compatibility.cell("nf4", "lora")["name"]
    whole, part = (one[packed]["ranks"][0]["base_bytes"] for one in (expected_of, found))
    assert part == whole if backend in ("ddp", "zero2") else 0.49 < part / whole < 0.55
