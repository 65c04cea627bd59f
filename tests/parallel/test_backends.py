"""Law 3: with every backend and number of processes a run equals one process given all rows; and each is what it says."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.bases import make_base
from tests.helpers.ranks import STEPS, Case, run_cases
from tests.helpers.rows import write_judged_rows, write_text_rows, write_uneven_rows, write_weighted_rows

pytestmark = [pytest.mark.spread, pytest.mark.slow]

PLAIN: Case = {"name": "plain"}
ACCUMULATED: Case = {"name": "accumulated", "micro_batch_size": 2, "rank": 1, "checkpointing": True}
PADDED: Case = {
    "name": "padded", "micro_batch_size": 3, "rank": 8, "packing": False, "max_grad_norm": None, "objective": "two terms",
}  # fmt: skip
HALF: Case = {"name": "half", "dtype": "bfloat16", "micro_batch_size": 3}
FLOAT16: Case = {"name": "float16", "dtype": "float16", "loss_scale": 2.0**30}
OFFLOADED_ACTIVATIONS: Case = {
    "name": "offloaded-activations", "micro_batch_size": 2, "rank": 1, "checkpointing": "offload",
}  # fmt: skip
FIRST_HALF: Case = {"name": "first-half", "steps": STEPS // 2}
SGD: Case = {"name": "sgd", "optimizer": "sgd"}
SGD_FIRST_HALF: Case = SGD | {"name": "sgd-first-half", "steps": STEPS // 2}
PAIRS: Case = {
    "name": "pairs", "steps": 3, "batch_size": 6, "micro_batch_size": 2, "packing": False, "objective": "pairs",
}  # fmt: skip
WEIGHTED: Case = {"name": "weighted", "steps": 2, "micro_batch_size": 2, "rows": "weighted.jsonl", "packing": False}
KTO: Case = {
    "name": "kto", "steps": 3, "batch_size": 5, "micro_batch_size": 2, "rows": "judged.jsonl", "objective": "kto",
}  # fmt: skip
EMBED: Case = {
    "name": "embed", "steps": 3, "batch_size": 6, "micro_batch_size": 2, "rows": "texts.jsonl", "objective": "embed",
    "dropout": 0.2,
}  # fmt: skip
EVERYWHERE = [PLAIN, ACCUMULATED, PADDED, WEIGHTED]
ALONE = [*EVERYWHERE, PAIRS, KTO, EMBED, HALF, FLOAT16, OFFLOADED_ACTIVATIONS, FIRST_HALF, SGD, SGD_FIRST_HALF]
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
SHARED = [*((backend, 1) for backend in BACKENDS), *((backend, 4) for backend in BACKENDS)]
"""Backends and numbers of processes whose code two processes share: left to `make matrix`."""
IN_MAKE_TEST = ("zero3", "fsdp2")  # one test of another backend would run all of its cases
Results = Callable[[str, int], dict[str, Any]]


def of_backend(backend: str, *values: Any, matrix: bool = False) -> Any:
    """A parameter set whose test runs in the worker of pytest that has the backend's results."""
    matrix = matrix or backend not in IN_MAKE_TEST
    marks = [pytest.mark.xdist_group(backend), *([pytest.mark.matrix] if matrix else [])]
    return pytest.param(backend, *values, marks=marks)


every_backend = pytest.mark.parametrize("backend", [of_backend(backend) for backend in BACKENDS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A base of odd widths, and rows of uneven length."""
    folder = tmp_path_factory.mktemp("ranks")
    make_base(
        folder / "base", tokenizer, hidden_size=36, intermediate_size=50, num_attention_heads=3, num_key_value_heads=3,
        head_dim=10,
    )  # fmt: skip
    write_uneven_rows(folder / "rows.jsonl", 20)
    write_weighted_rows(folder / "weighted.jsonl", 20)
    write_judged_rows(folder / "judged.jsonl", 20)
    write_text_rows(folder / "texts.jsonl", 20)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """The results of a backend's cases in so many processes, all in one launch, which the first test starts."""

    @functools.cache
    def results(backend: str, processes: int) -> dict[str, Any]:
        if backend != "single":
            torch.save(results("single", 1)["first-half"], folder / "half.pt")
            torch.save(results("single", 1)["sgd-first-half"], folder / "sgd-half.pt")
        return run_cases(folder, processes, cases_of(backend, processes, folder))

    return results


def cases_of(backend: str, processes: int, folder: Path) -> list[Case]:
    plain = {"backend": backend} | ({"prefetch_mb": 0} if backend == "zero3" else {})
    if backend == "single":
        return [case | {"parallel": plain} for case in ALONE]
    if processes == 1:
        return [PLAIN | {"parallel": plain}]
    resumed = {"name": "resumed", "resume": str(folder / "half.pt")}
    cases = [case | {"parallel": plain} for case in (*EVERYWHERE, PLAIN | resumed)]
    cases.append(ACCUMULATED | {"name": "onednn", "products": "onednn", "parallel": plain})
    if processes == 2:
        cases += [case | {"parallel": plain} for case in (PAIRS, KTO, EMBED, HALF, FLOAT16, OFFLOADED_ACTIVATIONS)]
        if backend != "ddp":
            cases.append(ACCUMULATED | {"name": "offloaded", "parallel": plain | {"offload": "cpu"}})
        if backend == "fsdp2":
            sgd = [SGD, SGD | {"name": "sgd-resumed", "resume": str(folder / "sgd-half.pt")}]
            cases += [case | {"parallel": plain} for case in sgd]
        if backend == "zero3":
            cases.append(PLAIN | {"name": "prefetched", "parallel": {"backend": backend}})
    return cases


def assert_same(result: Any, expected: Any, *, adapter: float = 1e-4, losses: float = 2e-6) -> None:
    assert result["eval"] == pytest.approx(expected["eval"], rel=losses)
    for step, metrics in enumerate(expected["metrics"]):
        # a margin, and so the loss of a pair, is a difference of sums, the largest values, and has their rounding
        largest = max(map(abs, metrics))
        assert result["losses"][step] == pytest.approx(expected["losses"][step], rel=losses, abs=1e-7 * largest)
        rounding = 0.05 if losses > 2e-6 else max(1e-5, 3e-6 * largest)
        assert result["metrics"][step] == pytest.approx(metrics, rel=losses, abs=rounding)
    assert len(result["losses"]) == len(result["metrics"]) == len(expected["losses"]) == len(expected["metrics"])
    assert result["norms"] == pytest.approx(expected["norms"], rel=max(1e-4, 10 * losses))
    for part, limit in (("adapter", adapter), ("optimizer", 10 * adapter)):
        names = {name for name in expected[part] if name != "loss_scale"}  # it depends on how a step is cut
        assert {name for name in result[part] if name != "loss_scale"} == names
        for name in names:
            one, other = result[part][name].double(), expected[part][name].double()  # a step may be a whole number
            assert one.shape == other.shape, name
            assert (one - other).norm() <= limit * other.norm() + 1e-12, name
    assert result["unreached"] == []


@pytest.mark.parametrize(
    ("backend", "processes"),
    [of_backend(backend, n, matrix=(backend, n) in SHARED) for backend in BACKENDS for n in (1, 2, 4)],
)
def test_backends_agree(results: Results, backend: str, processes: int) -> None:
    for case in [PLAIN] if processes == 1 else EVERYWHERE:
        assert_same(results(backend, processes)[case["name"]], results("single", 1)[case["name"]])


@every_backend
def test_products_by_onednn_are_those_of_torch(results: Results, backend: str) -> None:
    result = results(backend, 2)["onednn"]

    assert_same(result, results("single", 1)["accumulated"])
    of_torch = results(backend, 2)["accumulated"]["adapter"]
    assert any(not torch.equal(result["adapter"][name], tensor) for name, tensor in of_torch.items())  # other bits


@every_backend
def test_backends_agree_on_pairs_of_rows(results: Results, backend: str) -> None:
    for case in ("pairs", "kto", "embed"):
        assert_same(results(backend, 2)[case], results("single", 1)[case])


@every_backend
def test_backends_agree_in_half_precision(results: Results, backend: str) -> None:
    alone, result = results("single", 1), results(backend, 2)

    assert_same(result["half"], alone["half"], adapter=2e-2, losses=2e-3)
    assert_same(result["float16"], alone["float16"], adapter=1e-2, losses=1e-3)
    for scaled in (result["float16"], alone["float16"]):
        assert 1 < scaled["scale"] < 2.0**30  # it overflowed, and recovered
    assert alone["float16"]["losses"] == pytest.approx(alone["plain"]["losses"], rel=2e-2)  # no step was left out


@every_backend
def test_offloading_changes_nothing(results: Results, backend: str) -> None:
    alone, result = results("single", 1), results(backend, 2)

    assert alone["offloaded-activations"]["losses"] == alone["accumulated"]["losses"]
    assert_same(result["offloaded-activations"], alone["accumulated"])
    if backend != "ddp":
        assert_same(result["offloaded"], alone["accumulated"])
    if backend == "zero3":
        assert_same(result["prefetched"], alone["plain"])


@every_backend
def test_inputs_that_can_be_recomputed_are_saved_nowhere(results: Results, backend: str) -> None:
    """Also not where an engine takes weights away between forward and backward, or wraps what modules give."""
    in_a_step = 2 * 6 - 3  # not the inputs of o_proj, nor the one that reads an embedding
    assert results("single", 1)["plain"]["recomputed"] == STEPS * in_a_step
    assert results(backend, 2)["plain"]["recomputed"] == STEPS * in_a_step


def after_half(alone: Any, rest: Any, half: str = "first-half") -> Any:
    """A whole run: the first half of the steps alone, the rest elsewhere."""
    return rest | {key: alone[half][key] + rest[key] for key in ("losses", "norms", "metrics")}


@pytest.mark.parametrize(
    ("backend", "processes"),
    [of_backend(backend, n, matrix=(backend, n) in SHARED) for backend in BACKENDS for n in (2, 4)],
)
def test_state_moves_to_a_backend(results: Results, backend: str, processes: int) -> None:
    """The first half of the steps alone, the second in processes that took its state over; 4 divide not every tensor."""
    alone = results("single", 1)

    assert_same(after_half(alone, results(backend, processes)["resumed"]), alone["plain"])


@pytest.mark.parametrize("backend", [of_backend("fsdp2")])
def test_a_run_with_sgd_moves_to_shards_of_its_momentum(results: Results, backend: str) -> None:
    alone, result = results("single", 1), results(backend, 2)

    assert_same(result["sgd"], alone["sgd"])
    assert_same(after_half(alone, result["sgd-resumed"], "sgd-first-half"), alone["sgd"])


@every_backend
def test_resident_and_sent_bytes_are_those_of_the_backend(results: Results, backend: str) -> None:
    """Bytes and messages are counted, not assumed."""
    alone = results("single", 1)["plain"]
    base, adapter = alone["ranks"][0]["base_bytes"], alone["ranks"][0]["adapter_bytes"]
    assert adapter == sum(tensor.nbytes for tensor in alone["adapter"].values())

    ranks = results(backend, 2)["plain"]["ranks"]

    optimizer = sum(rank["optimizer_bytes"] for rank in ranks)
    assert optimizer == pytest.approx((4 if backend == "ddp" else 2) * adapter, rel=0.05)
    splits_base = backend in ("zero3", "fsdp2")
    for rank in ranks:
        assert rank["backend"] == backend
        assert rank["base_bytes"] == (pytest.approx(base / 2, rel=0.02) if splits_base else base)
        assert rank["collectives_by_axis"] == {"replicas": rank["collectives_of_a_step"]}
        assert rank["groups_of_no_axis"] == []
        sent = {kind: count["bytes"] for kind, count in rank["collectives_of_a_step"].items()}
        added = sent.get("all_reduce", 0) + sent.get("reduce_scatter", 0)
        assert adapter <= added <= 1.2 * adapter + 1024  # the adapter's gradients meet once, nothing of the base does
        if splits_base:
            assert base < sent["all_gather"] <= 2.2 * (base + adapter)  # no part is gathered a third time
        else:
            assert sent.get("all_gather", 0) <= 1.1 * adapter
