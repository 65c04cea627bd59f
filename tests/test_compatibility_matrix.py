"""docs/support.md is up to date; and every cell of it, on every backend, trains as one process does."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.support_page import PAGE, page
from tests.helpers import compatibility
from tests.helpers.compatibility import case_of
from tests.helpers.ranks import Case, run_cases
from tests.helpers.rows import write_uneven_rows

pytestmark = pytest.mark.xdist_group("compatibility")

CHOSEN = {  # those of `make test`: every method, every kind, every target, not each with each
    ("nf4", "lora"), ("int8", "lora"), ("fp4", "rslora"), ("nf4 in its files", "dora"), ("nf4", "init: pissa"),
    ("floats", "rsdora"), ("floats", "lora_fa"), ("floats", "init: olora"), ("floats", "embedding"),
    ("floats, tied head", "trainable_tokens"),
    ("floats", "trainable_tokens"), ("floats", "modules_to_save"), ("floats, Conv1D", "bias: all"),
    ("floats, experts", "target_parameters"), ("floats", "output head"), ("floats", "new_tokens"),
    ("floats, tied head", "new_tokens"),
}  # fmt: skip

RESUMED = [  # with tensors in a checkpoint besides A and B: fixed starts, magnitudes, full tensors, rows, experts
    ("nf4", "init: pissa"), ("floats", "lora_fa"), ("floats", "rsdora"), ("floats", "modules_to_save"),
    ("floats", "trainable_tokens"), ("floats", "new_tokens"), ("floats, experts", "target_parameters"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("compatibility")
    compatibility.make_bases(folder, tokenizer)
    write_uneven_rows(folder / "rows.jsonl", 20)
    return folder


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # bitsandbytes' own, on CPUs
def test_the_page_is_up_to_date(folder: Path) -> None:
    refusals = compatibility.refusals(folder)

    assert PAGE.read_text() == page(refusals)
    trainable = [cell for cell, why in refusals.items() if why is None and cell not in compatibility.ABSENT]
    assert len(trainable) > 60
    assert set(trainable) >= CHOSEN


def cases_of(folder: Path, backend: str, *, chosen: bool) -> list[Case]:
    """Two steps of the chosen cells, or of all that are not refused."""
    ahead = {"prefetch_mb": 0.0} if backend == "zero3" else {}  # so small a base would be prefetched completely
    cells = [(kind, feature) for kind in compatibility.KINDS for feature in compatibility.FEATURES]
    return [
        case_of(*cell) | {"steps": 2, "evaluate": False, "parallel": {"backend": backend, **ahead}}
        for cell in cells
        if (cell in CHOSEN if chosen else cell not in compatibility.ABSENT and compatibility.refusal(folder, *cell) is None)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[bool], dict[str, Any]]:
    """The results of one process, computed at the first call; the chosen ones also saved, to be resumed from."""

    @functools.cache
    def run(chosen: bool) -> dict[str, Any]:
        longer = [
            case_of(*cell)
            | {"name": f"{case_of(*cell)['name']}-resumed", "steps": 4, "parallel": {"backend": "single"}}
            for cell in RESUMED
            if chosen
        ]
        results = run_cases(folder, 1, [*cases_of(folder, "single", chosen=chosen), *longer])
        for cell in RESUMED:
            torch.save(results[name := case_of(*cell)["name"]], folder / f"{name}.pt")
        return results

    return run


def resumed(folder: Path, backend: str) -> list[Case]:
    """Steps 3 and 4 of runs whose first two were taken by one process, so that no tensor is as at the start."""
    return [
        case | {"name": f"{case['name']}-resumed", "resume": str(folder / f"{case['name']}.pt"), "steps": 4}
        | {"evaluate": False, "parallel": {"backend": backend}}
        for case in (case_of(*cell) for cell in RESUMED)
    ]  # fmt: skip


@pytest.mark.spread
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        *((backend, True) for backend in ("zero3", "fsdp2", "ddp", "zero2")),
        *((backend, False) for backend in compatibility.BACKENDS[1:]),
    ],
)
def test_two_processes_train_as_one_does(
    backend: str, chosen: bool, folder: Path, alone: Callable[[bool], dict[str, Any]]
) -> None:
    expected_of = alone(chosen)
    cases = [*cases_of(folder, backend, chosen=chosen), *(resumed(folder, backend) if chosen else [])]
    results = run_cases(folder, 2, cases)

    for name, result in results.items():
        expected = expected_of[name]
        assert result["unreached"] == []
        losses = torch.tensor(expected["losses"][-len(result["losses"]) :])
        torch.testing.assert_close(torch.tensor(result["losses"]), losses, rtol=2e-5, atol=0)
        assert result["adapter"].keys() == expected["adapter"].keys()
        for key, tensor in expected["adapter"].items():
            if key.endswith("c_attn.bias"):
                continue  # a third of it has no gradient but rounding, as keys may be shifted; Adam makes steps of it
            differs = (result["adapter"][key] - tensor).abs() > 2e-5 + 2e-3 * tensor.abs()
            assert differs.float().mean() < 1e-3, f"{name}: {key}"  # a gradient near zero may round to either sign
    nf4 = case_of("nf4", "lora")["name"]
    full, shard = (one[nf4]["ranks"][0]["base_bytes"] for one in (expected_of, results))
    assert shard == full if backend in ("ddp", "zero2") else 0.49 < shard / full < 0.55
