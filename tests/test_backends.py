"""Law 3: for every backend and number of processes, a run equals one process given all the rows; and each is what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import chat, make_base, write_rows

ROOT = Path(__file__).parent.parent
SPREAD = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
PLAIN: dict[str, Any] = {"name": "plain"}
ACCUMULATED: dict[str, Any] = {"name": "accumulated", "micro_batch_size": 2, "rank": 1, "checkpointing": True}
PADDED: dict[str, Any] = {"name": "padded", "micro_batch_size": 3, "rank": 8, "packing": False, "max_grad_norm": None}
HALF: dict[str, Any] = {"name": "half", "dtype": "bfloat16", "micro_batch_size": 3}
FLOAT16: dict[str, Any] = {"name": "float16", "dtype": "float16", "loss_scale": 2.0**30, "steps": 6}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Any]:
    """A base with odd widths and 41 rows of uneven length, and a way to run cases on it."""
    folder = tmp_path_factory.mktemp("ranks")
    base = make_base(
        folder / "base", tokenizer, hidden_size=36, intermediate_size=50, num_attention_heads=3, num_key_value_heads=3,
        head_dim=10,
    )  # fmt: skip
    rows = write_rows(folder / "rows.jsonl", [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(41)])
    references: dict[str, Any] = {}

    def alone(case: dict[str, Any]) -> Any:
        name = json.dumps(case)
        if name not in references:
            references[name] = launch(folder, base, rows, 1, [case | {"parallel": {"backend": "single"}}])[case["name"]]
        return references[name]

    def spread(processes: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
        return launch(folder, base, rows, processes, cases)

    return {"alone": alone, "spread": spread, "base": base, "rows": rows}


def launch(folder: Path, base: Path, rows: Path, processes: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    place = folder / f"case-{len(list(folder.iterdir()))}"
    place.mkdir()
    (place / "cases.json").write_text(json.dumps({"base": str(base), "rows": str(rows), "cases": cases}))
    command = [sys.executable, "-m", "tests.ranks", str(place)]
    if cases[0]["parallel"]["backend"] != "single":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
            *command[1:],
        ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return {case["name"]: torch.load(place / f"{case['name']}.pt") for case in cases}


def assert_same(found: Any, expected: Any, *, adapter: float = 1e-4, losses: float = 1e-6) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=losses)
    assert found["eval"] == pytest.approx(expected["eval"], rel=losses)
    assert found["norms"] == pytest.approx(expected["norms"], rel=max(1e-4, 10 * losses))
    assert found["adapter"].keys() == expected["adapter"].keys()
    for tensors in (found["optimizer"], expected["optimizer"]):
        tensors.pop("loss_scale", None)  # how large a gradient may be depends on how the step is cut
    for part in ("adapter", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            limit = adapter * (10 if part == "optimizer" else 1)
            assert found[part][name].shape == tensor.shape, name
            assert (found[part][name] - tensor).norm() <= limit * tensor.norm() + 1e-12, name
    assert found["unreached"] == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("backend", SPREAD)
def test_backends_agree(world: Any, backend: str, processes: int) -> None:
    cases = [PLAIN, ACCUMULATED, PADDED] if processes > 1 else [PLAIN]

    found = world["spread"](processes, [case | {"parallel": {"backend": backend}} for case in cases])

    for case in cases:
        assert_same(found[case["name"]], world["alone"](case))


@pytest.mark.slow
@pytest.mark.parametrize("backend", SPREAD)
def test_backends_agree_in_half_precision(world: Any, backend: str) -> None:
    found = world["spread"](2, [case | {"parallel": {"backend": backend}} for case in (HALF, FLOAT16)])

    assert_same(found["half"], world["alone"](HALF), adapter=2e-2, losses=2e-3)
    assert_same(found["float16"], world["alone"](FLOAT16), adapter=1e-2, losses=1e-3)
    assert 1 < found["float16"]["scale"] < 2.0**30  # it overflowed, and recovered
    assert 1 < world["alone"](FLOAT16)["scale"] < 2.0**30


Spread = Callable[[int, list[dict[str, Any]]], dict[str, Any]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3", "fsdp2"])
def test_offloading_changes_nothing(world: Any, backend: str, tmp_path: Path) -> None:
    cases = [ACCUMULATED | {"parallel": {"backend": backend, "offload": "cpu"}}]
    if backend == "zero3":
        nvme = {"backend": backend, "offload": "nvme", "nvme_path": str(tmp_path)}
        cases.append(ACCUMULATED | {"name": "nvme", "parallel": nvme})

    found = world["spread"](2, cases)

    for case in cases:
        assert_same(found[case["name"]], world["alone"](ACCUMULATED))


@pytest.mark.slow
@pytest.mark.parametrize("backend", SPREAD)
def test_state_moves_between_backends(world: Any, backend: str, tmp_path: Path) -> None:
    """Half of the steps alone, half in several processes with the state taken over; and the other way round."""
    half = world["alone"](PLAIN | {"steps": 6})
    torch.save(half, tmp_path / "half.pt")
    cases: list[dict[str, Any]] = [PLAIN | {"resume": str(tmp_path / "half.pt"), "parallel": {"backend": backend}}]
    if backend == "zero3":
        offloads = {"backend": backend, "offload": "nvme", "nvme_path": str(tmp_path)}
        cases.append(cases[0] | {"name": "nvme", "parallel": offloads})

    found = world["spread"](2, cases)

    whole = world["alone"](PLAIN)
    for case in cases:
        rest = found[case["name"]]
        assert_same(rest | {"losses": half["losses"] + rest["losses"], "norms": half["norms"] + rest["norms"]}, whole)


@pytest.mark.slow
@pytest.mark.parametrize("backend", SPREAD)
def test_what_is_held_and_sent(world: Any, backend: str) -> None:
    """Bytes and messages are counted, not assumed."""
    alone = world["alone"](PLAIN)["ranks"][0]
    base, adapter = alone["base_bytes"], alone["adapter_bytes"]
    assert adapter == sum(tensor.nbytes for tensor in world["alone"](PLAIN)["adapter"].values())

    settings = {"backend": backend} | ({"prefetch_mb": 0} if backend == "zero3" else {})
    result = world["spread"](2, [PLAIN | {"parallel": settings}])["plain"]

    optimizer = sum(rank["optimizer_bytes"] for rank in result["ranks"])
    assert optimizer == pytest.approx((4 if backend == "ddp" else 2) * adapter, rel=0.05)
    splits_base = backend in ("zero3", "fsdp2")
    for rank in result["ranks"]:
        assert rank["backend"] == backend
        assert rank["base_bytes"] == (pytest.approx(base / 2, rel=0.02) if splits_base else base)
        sent = {kind: count["bytes"] for kind, count in rank["collectives_of_a_step"].items()}
        added = sent.get("all_reduce", 0) + sent.get("reduce_scatter", 0)
        assert adapter <= added <= 1.1 * adapter + 1024  # the adapter's gradients meet once, nothing of the base does
        if splits_base:
            assert base < sent["all_gather"] <= 2 * (base + adapter) * 1.1  # no part is gathered a third time
        else:
            assert sent.get("all_gather", 0) <= 1.1 * adapter
