"""The bank of factors: ranks never move, are used again only when nobody can reach them, and are not concatenated."""

import gc
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lorakit
from lorakit.errors import LorakitError
from lorakit.slots.bank import MAX_BLOCK_RANKS, Factors, LayerBank, rank_blocks
from tests.helpers.patches import make_patch

IN, OUT = 6, 4


def factors_of(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rank, IN, generator=generator), torch.randn(OUT, rank, generator=generator)


def test_columns_never_move_and_never_overlap_whatever_is_added_and_removed() -> None:
    bank, resident, random_source = (
        LayerBank(torch.empty(0), (OUT, IN)),
        dict[int, tuple[int, Factors]](),
        random.Random(0),
    )
    for number in range(400):
        rank = random_source.choice([1, 2, 5, 8, 16, 200])
        resident[number] = rank, bank.add(*factors_of(number, rank), 2.0, number)
        for gone in random_source.sample(list(resident), random_source.choice([0, 1, 1, len(resident) // 2])):
            del resident[gone]
        for other, (size, stored) in resident.items():
            A, B = factors_of(other, size)
            assert torch.equal(stored.A, A)
            assert torch.equal(stored.B.T, B)
    used = sum(rank for rank, _ in resident.values())
    assert sum(len(block.owners) for block in bank._taken) <= 3 * used + 2 * MAX_BLOCK_RANKS
    resident.clear()
    del stored
    assert not bank._taken


def test_adapters_added_and_freed_in_several_threads_stay_whole() -> None:
    bank = LayerBank(torch.empty(0), (OUT, IN))
    broken: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 300):
            stored = bank.add(*factors_of(number, 3), 1.0, number)
            if not torch.equal(stored.A, factors_of(number, 3)[0]):
                broken.append(number)

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken == []
    gc.collect()
    assert bank.add(*factors_of(0, 1), 1.0, 0).ranks.start == 0
    assert not bank._taken


def test_one_that_comes_when_another_has_gone_takes_no_more_memory() -> None:
    bank, add = LayerBank(torch.empty(0), (OUT, IN)), lambda number: bank.add(*factors_of(number, 4), 1.0, number)
    stored = [add(number) for number in range(8)]

    for number in range(8, 20):
        del stored[0]
        stored.append(add(number))
        assert sum(len(block.owners) for block in bank._taken) == 32


def test_neighbours_are_read_as_a_range_and_distant_adapters_by_an_index() -> None:
    bank = LayerBank(torch.empty(0), (OUT, IN))
    stored = [bank.add(*factors_of(number, 8), 1.0, number) for number in range(16)]
    block = stored[-1].block
    own = [one for one in stored if one.block is block]
    assert len(own) == 8

    (near,) = rank_blocks(own[1:4])
    (far,) = rank_blocks([own[0], own[-1]])

    assert near.A.data_ptr() == own[1].A.data_ptr()
    assert far.A.data_ptr() != own[0].A.data_ptr()
    assert torch.equal(far.A, torch.cat([own[0].A, own[-1].A]))
    assert set(far.owners.tolist()) == {8, 15}


class Allocations(TorchDispatchMode):
    """Counts the elements of every new tensor that is as wide as a factor of the model's layers."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = any(word in func.name() for word in ("cat", "index", "clone", "stack"))
        if is_copy and isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] in self.widths:
            self.rows += result.shape[0]
        return result


def test_a_new_composition_of_a_batch_copies_no_factors(base: Any, tmp_path: Any) -> None:
    folders = {f"a{seed}": make_patch(base, tmp_path / f"a{seed}", seed=seed, rank=4) for seed in range(5)}
    model = lorakit.load(base, folders, dtype="float32")
    width = model.model.config.hidden_size
    rows = model.model.config.intermediate_size
    ids = torch.arange(5, 9)[:, None]
    blocks = {block for bank in model._banks.values() for block in bank._taken}
    for names in (["a0", "a1", "a2", "a3"], ["a3", "a1", None, "a0"], ["a4", "a2", "a4", "a1"]):
        with Allocations(width, rows) as counted:
            model(ids, adapters=names)
        assert counted.rows == 0
    assert {block for bank in model._banks.values() for block in bank._taken} == blocks


def test_the_same_patch_under_two_names_is_stored_once(base: Any, tmp_path: Any) -> None:
    folder = make_patch(base, tmp_path / "a", rank=4)
    model = lorakit.load(base, {"a": folder}, dtype="float32")
    before = sum(len(block.owners) for bank in model._banks.values() for block in bank._taken)

    model.load_adapter("b", folder)

    assert sum(len(block.owners) for bank in model._banks.values() for block in bank._taken) == before
    model.unload_adapter("a")
    ids = torch.arange(5, 9)[:, None]
    assert not torch.equal(model(ids, adapters="b").logits, model(ids).logits)
    model.unload_adapter("b")
    assert not any(bank._taken for bank in model._banks.values())


def test_activation_checkpointing_is_refused_where_it_would_lose_the_route(base: Any, tmp_path: Any) -> None:
    model = lorakit.load(base, {"a": make_patch(base, tmp_path / "a")}, dtype="float32")
    model.model.train()
    model.model.activation_checkpointing_enable()
    with pytest.raises(LorakitError, match="computes layers again in backward"):
        model(torch.arange(5, 9)[None], adapters="a")
    with torch.no_grad():
        model(torch.arange(5, 9)[None], adapters="a")
