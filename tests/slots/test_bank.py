"""The bank of factors: slots never move, are used again only when nobody can reach them, and are not copied."""

import gc
import random
import threading
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lorakit
from lorakit.errors import LorakitError
from lorakit.lora.layer_kinds import LINEAR
from lorakit.slots.bank import MAX_BLOCK_RANKS, Factors, LayerBank
from lorakit.slots.hooks import SlotHook
from lorakit.slots.routing import Adapter, Route, Slot
from tests.helpers.patches import make_patch

IN, OUT = 6, 4


def num_ranks(bank: LayerBank) -> int:
    return sum(block.A.shape[:2].numel() for block in bank.taken)


def factors_of(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rank, IN, generator=generator), torch.randn(OUT, rank, generator=generator)


def test_slots_never_move_and_never_overlap_whatever_is_added_and_removed() -> None:
    bank, resident, random_source = (LayerBank(), dict[int, tuple[int, Factors]](), random.Random(0))
    for number in range(400):
        rank = random_source.choice([1, 2, 5, 8, 16, 200])
        resident[number] = rank, bank.add(*factors_of(number, rank))
        for gone in random_source.sample(list(resident), random_source.choice([0, 1, 1, len(resident) // 2])):
            del resident[gone]
        for other, (size, stored) in resident.items():
            A, B = factors_of(other, size)
            assert torch.equal(stored.A, A)
            assert torch.equal(stored.B.T, B)
    used = sum(rank for rank, _ in resident.values())
    assert num_ranks(bank) <= 3 * used + 6 * MAX_BLOCK_RANKS
    resident.clear()
    del stored
    assert not bank.taken


def test_adapters_added_and_freed_in_several_threads_stay_whole() -> None:
    bank = LayerBank()
    broken: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 300):
            stored = bank.add(*factors_of(number, 3))
            if not torch.equal(stored.A, factors_of(number, 3)[0]):
                broken.append(number)

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken == []
    gc.collect()
    assert bank.add(*factors_of(0, 1)).slot == 0
    assert not bank.taken


def test_one_that_comes_when_another_has_gone_takes_no_more_memory() -> None:
    bank, add = LayerBank(), lambda number: bank.add(*factors_of(number, 4))
    stored = [add(number) for number in range(8)]

    for number in range(8, 20):
        del stored[0]
        stored.append(add(number))
        assert num_ranks(bank) == 32


@pytest.mark.parametrize("height", [1, 4])
def test_each_row_gets_the_update_of_its_adapter_and_no_factor_is_copied(height: int) -> None:
    bank, chooser = LayerBank(), random.Random(0)
    adapters: list[Adapter | None] = [None]
    for number in range(16):
        factors = bank.add(*factors_of(number, 2 + number % 2))
        adapters.append(Adapter(number, {"layer": Slot(factors)}))
    hook = SlotHook("layer", LINEAR, ContextVar("route", default=None))
    for _ in range(100):
        chosen = tuple(chooser.choice(adapters) for _ in range(chooser.randrange(2, 9)))
        x, y = torch.randn(len(chosen), IN), torch.randn(len(chosen), OUT)
        expected = y.clone()
        for row, adapter in enumerate(chosen):
            if adapter is not None:
                A, B = factors_of(adapter.number, 2 + adapter.number % 2)
                expected[row] += x[row] @ A.T @ B.T
        route = Route(chosen, height=height)

        hook._add_updates(route, x, y)

        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        for block, table in route.blocks("layer", x):
            assert len(table.tokens) % (height * len(block.A)) == 0
            assert any(block.A.untyped_storage()._cdata == one.A.untyped_storage()._cdata for one in bank.taken)


def test_adapters_that_are_expected_lie_in_one_block() -> None:
    bank = LayerBank(expected_adapters=6)
    stored = [bank.add(*factors_of(number, 4)) for number in range(6)]

    assert [one.slot for one in stored] == [0, 1, 2, 3, 4, 5]
    assert num_ranks(bank) == 24


def test_adapters_of_other_ranks_are_among_those_that_are_expected() -> None:
    bank = LayerBank(expected_adapters=4)
    stored = [bank.add(*factors_of(number, rank)) for number, rank in enumerate([1, 2, 3, 4])]

    assert sum(one.block.A.shape[0] for one in stored) == 4 + 3 + 2 + 1


def test_a_call_under_autocast_leaves_nothing_to_one_without(base: Any, tmp_path: Any) -> None:
    folders = {f"a{seed}": make_patch(base, tmp_path / f"a{seed}", seed=seed, rank=4) for seed in range(2)}
    model = lorakit.load(base, folders, dtype="float32")
    ids = torch.arange(5, 7)[:, None]
    with torch.no_grad():
        expected = model(ids, adapters=["a0", "a1"]).logits
        model.load_adapter("a2", folders["a0"])  # a new route
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, adapters=["a0", "a1"])
        torch.testing.assert_close(model(ids, adapters=["a0", "a1"]).logits, expected)


class Allocations(TorchDispatchMode):
    """Counts the elements of every new tensor that is as wide as a factor of the model's layers."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = any(word in func.name() for word in ("cat", "index", "clone", "stack"))
        if is_copy and isinstance(result, Tensor) and result.dim() == 3 and result.shape[2] in self.widths:
            self.rows += result.shape[0]
        return result


def test_a_new_composition_of_a_batch_copies_no_factors(base: Any, tmp_path: Any) -> None:
    folders = {f"a{seed}": make_patch(base, tmp_path / f"a{seed}", seed=seed, rank=4) for seed in range(5)}
    model = lorakit.load(base, folders, dtype="float32")
    width = model.model.config.hidden_size
    rows = model.model.config.intermediate_size
    ids = torch.arange(5, 9)[:, None]
    blocks = {block for bank in model._banks.values() for block in bank.taken}
    for names in (["a0", "a1", "a2", "a3"], ["a3", "a1", None, "a0"], ["a4", "a2", "a4", "a1"]):
        with Allocations(width, rows) as counted:
            model(ids, adapters=names)
        assert counted.rows == 0
    assert {block for bank in model._banks.values() for block in bank.taken} == blocks


def test_the_same_patch_under_two_names_is_stored_once(base: Any, tmp_path: Any) -> None:
    folder = make_patch(base, tmp_path / "a", rank=4)
    model = lorakit.load(base, {"a": folder}, dtype="float32")
    before = sum(map(num_ranks, model._banks.values()))

    model.load_adapter("b", folder)

    assert sum(map(num_ranks, model._banks.values())) == before
    model.unload_adapter("a")
    ids = torch.arange(5, 9)[:, None]
    assert not torch.equal(model(ids, adapters="b").logits, model(ids).logits)
    model.unload_adapter("b")
    assert not any(bank.taken for bank in model._banks.values())


def test_activation_checkpointing_is_refused_where_it_would_lose_the_route(base: Any, tmp_path: Any) -> None:
    model = lorakit.load(base, {"a": make_patch(base, tmp_path / "a")}, dtype="float32")
    model.model.train()
    model.model.activation_checkpointing_enable()
    with pytest.raises(LorakitError, match="computes layers again in backward"):
        model(torch.arange(5, 9)[None], adapters="a")
    with torch.no_grad():
        model(torch.arange(5, 9)[None], adapters="a")
