"""Law 3: with every backend and number of processes a run equals one process given all rows; and each is what it says."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import chat, make_base, write_rows

pytestmark = pytest.mark.spread

ROOT = Path(__file__).parents[2]
Case = dict[str, Any]
PLAIN: Case = {"name": "plain"}
ACCUMULATED: Case = {"name": "accumulated", "micro_batch_size": 2, "rank": 1, "checkpointing": True}
PADDED: Case = {"name": "padded", "micro_batch_size": 3, "rank": 8, "packing": False, "max_grad_norm": None}
HALF: Case = {"name": "half", "dtype": "bfloat16", "micro_batch_size": 3}
FLOAT16: Case = {"name": "float16", "dtype": "float16", "loss_scale": 2.0**30, "steps": 6}
KEPT_ON_HOST: Case = {"name": "kept-on-host", "micro_batch_size": 2, "rank": 1, "checkpointing": "offload"}
FIRST_HALF: Case = {"name": "first-half", "steps": 6}
ALONE = [PLAIN, ACCUMULATED, PADDED, HALF, FLOAT16, KEPT_ON_HOST, FIRST_HALF]
EVERYWHERE = [PLAIN, ACCUMULATED, PADDED]
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
SHARED = [("ddp", 1), ("zero1", 1), ("zero1", 4)]
# a launch of several processes costs more than its cases: one for each backend and number of processes
spread = pytest.mark.parametrize("backend", BACKENDS)
Find = Callable[[str, int], dict[str, Any]]


def launch(folder: Path, processes: int, cases: list[Case]) -> dict[str, Any]:
    """What each case gave, from as many processes; the ``single`` backend is started without a launcher."""
    place = Path(tempfile.mkdtemp(dir=folder))
    told = {"base": str(folder / "base"), "rows": str(folder / "rows.jsonl"), "cases": cases}
    (place / "cases.json").write_text(json.dumps(told))
    command = [sys.executable, "-m", "tests.helpers.ranks", str(place)]
    if cases[0]["parallel"]["backend"] != "single":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *torchrun, *command[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    return {case["name"]: torch.load(place / f"{case['name']}.pt") for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A base of odd widths, and 41 rows of uneven length."""
    folder = tmp_path_factory.mktemp("ranks")
    make_base(
        folder / "base", tokenizer, hidden_size=36, intermediate_size=50, num_attention_heads=3, num_key_value_heads=3,
        head_dim=10,
    )  # fmt: skip
    write_rows(folder / "rows.jsonl", [chat(f"say {i}", "so " * (1 + i * 7 % 11) + str(i)) for i in range(41)])
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Find:
    """The results of a backend's cases; they are run when first asked for."""
    results: dict[tuple[str, int], dict[str, Any]] = {}

    def find(backend: str, processes: int) -> dict[str, Any]:
        key = (backend, processes)
        if key not in results:
            if backend != "single":
                torch.save(find("single", 1)["first-half"], folder / "half.pt")
            results[key] = launch(folder, processes, cases_of(backend, processes, folder))
        return results[key]

    return find


def cases_of(backend: str, processes: int, folder: Path) -> list[Case]:
    plain = {"backend": backend} | ({"prefetch_mb": 0} if backend == "zero3" else {})
    if backend == "single":
        return [case | {"parallel": plain} for case in ALONE]
    if processes == 1:
        return [PLAIN | {"parallel": plain}]
    cases = [case | {"parallel": plain} for case in EVERYWHERE]
    if processes == 2:
        resumed = {"name": "resumed", "resume": str(folder / "half.pt")}
        cases += [case | {"parallel": plain} for case in (HALF, FLOAT16, KEPT_ON_HOST, PLAIN | resumed)]
        if backend != "ddp":
            cases.append(ACCUMULATED | {"name": "offloaded", "parallel": plain | {"offload": "cpu"}})
        if backend == "zero3":
            cases.append(PLAIN | {"name": "prefetched", "parallel": {"backend": backend}})
    return cases


def assert_same(result: Any, expected: Any, *, adapter: float = 1e-4, losses: float = 1e-6) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=losses)
    assert result["eval"] == pytest.approx(expected["eval"], rel=losses)
    assert result["norms"] == pytest.approx(expected["norms"], rel=max(1e-4, 10 * losses))
    for part, limit in (("adapter", adapter), ("optimizer", 10 * adapter)):
        names = {name for name in expected[part] if name != "loss_scale"}  # it depends on how a step is cut
        assert {name for name in result[part] if name != "loss_scale"} == names
        for name in names:
            one, other = result[part][name], expected[part][name]
            assert one.shape == other.shape, name
            assert (one - other).norm() <= limit * other.norm() + 1e-12, name
    assert result["unreached"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "processes"),
    [  # what shares its code with another is left to `make attack`: a launch takes most of a minute
        pytest.param(backend, n, marks=[pytest.mark.attack] if (backend, n) in SHARED else [])
        for backend in BACKENDS
        for n in (1, 2, 4)
    ],
)
def test_backends_agree(found: Find, backend: str, processes: int) -> None:
    for case in [PLAIN] if processes == 1 else EVERYWHERE:
        assert_same(found(backend, processes)[case["name"]], found("single", 1)[case["name"]])


@pytest.mark.slow
@spread
def test_backends_agree_in_half_precision(found: Find, backend: str) -> None:
    alone, result = found("single", 1), found(backend, 2)

    assert_same(result["half"], alone["half"], adapter=2e-2, losses=2e-3)
    assert_same(result["float16"], alone["float16"], adapter=1e-2, losses=1e-3)
    for scaled in (result["float16"], alone["float16"]):
        assert 1 < scaled["scale"] < 2.0**30  # it overflowed, and recovered
    assert alone["float16"]["losses"] == pytest.approx(alone["plain"]["losses"][:6], rel=2e-2)  # no step was left out


@pytest.mark.slow
@spread
def test_offloading_changes_nothing(found: Find, backend: str) -> None:
    alone, result = found("single", 1), found(backend, 2)

    assert alone["kept-on-host"]["losses"] == alone["accumulated"]["losses"]
    assert_same(result["kept-on-host"], alone["accumulated"])
    if backend != "ddp":
        assert_same(result["offloaded"], alone["accumulated"])
    if backend == "zero3":
        assert_same(result["prefetched"], alone["plain"])


@pytest.mark.slow
@spread
def test_what_can_be_made_again_is_kept_nowhere(found: Find, backend: str) -> None:
    """Also not where an engine takes weights away between forward and backward, or wraps what modules give."""
    in_a_step = 2 * 6 - 3 - 2  # but for o_proj, what reads an embedding, and what reads a choice of tokens
    assert found("single", 1)["plain"]["recomputable"] == 12 * in_a_step
    assert found(backend, 2)["plain"]["recomputable"] == 12 * in_a_step


def after_half(alone: Any, rest: Any) -> Any:
    """A whole run: the first half of the steps alone, the rest elsewhere."""
    return rest | {key: alone["first-half"][key] + rest[key] for key in ("losses", "norms")}


@pytest.mark.slow
@spread
def test_state_moves_to_a_backend(found: Find, backend: str) -> None:
    """The first half of the steps alone, the second in several processes that took its state over."""
    alone = found("single", 1)

    assert_same(after_half(alone, found(backend, 2)["resumed"]), alone["plain"])


@pytest.mark.slow
@spread
def test_what_is_held_and_sent(found: Find, backend: str) -> None:
    """Bytes and messages are counted, not assumed."""
    alone = found("single", 1)["plain"]
    base, adapter = alone["ranks"][0]["base_bytes"], alone["ranks"][0]["adapter_bytes"]
    assert adapter == sum(tensor.nbytes for tensor in alone["adapter"].values())

    ranks = found(backend, 2)["plain"]["ranks"]

    optimizer = sum(rank["optimizer_bytes"] for rank in ranks)
    assert optimizer == pytest.approx((4 if backend == "ddp" else 2) * adapter, rel=0.05)
    splits_base = backend in ("zero3", "fsdp2")
    for rank in ranks:
        assert rank["backend"] == backend
        assert rank["base_bytes"] == (pytest.approx(base / 2, rel=0.02) if splits_base else base)
        sent = {kind: count["bytes"] for kind, count in rank["collectives_of_a_step"].items()}
        added = sent.get("all_reduce", 0) + sent.get("reduce_scatter", 0)
        assert adapter <= added <= 1.2 * adapter + 1024  # the adapter's gradients meet once, nothing of the base does
        if splits_base:
            assert base < sent["all_gather"] <= 2.2 * (base + adapter)  # no part is gathered a third time
        else:
            assert sent.get("all_gather", 0) <= 1.1 * adapter


@pytest.mark.slow
@pytest.mark.attack  # a first use compiles for minutes
def test_offloading_to_a_disk_changes_nothing_nor_does_going_on_with_it(
    found: Find, folder: Path, tmp_path: Path
) -> None:
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio is not installed (Debian: apt-get install libaio-dev)")
    parallel = {"backend": "zero3", "offload": "nvme", "nvme_path": str(tmp_path / "disk")}

    alone = found("single", 1)
    torch.save(alone["first-half"], folder / "half.pt")
    resumed = PLAIN | {"name": "resumed", "resume": str(folder / "half.pt")}

    result = launch(folder, 2, [case | {"parallel": parallel} for case in (ACCUMULATED, resumed)])

    assert_same(result["accumulated"], alone["accumulated"])
    assert_same(after_half(alone, result["resumed"]), alone["plain"])
