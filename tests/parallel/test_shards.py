"""A rank's part of a base, read from its files, is the part of the full base, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lorakit.base import lazy
from lorakit.base.lazy import LazyTensors
from lorakit.base.meta import load_on_meta
from lorakit.parallel import Group
from lorakit.parallel.tensor import shards
from lorakit.parallel.tensor.shards import Cut, CutDim, CutTensors
from tests.helpers.models import scrambled

ROWS, COLUMNS = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    scrambled("llama").save_pretrained(folder)
    return folder


def parts(size: int) -> Iterator[range]:
    yield from (range(5), range(5, size), range(size))


@pytest.mark.parametrize(("name", "dim"), [(ROWS, 0), (COLUMNS, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_that_is_read_is_the_part_of_the_full_tensor(
    folder: Path, name: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PIECE_BYTES", 3 * 48 * dtype.itemsize)  # three rows of down_proj
    weights = LazyTensors(folder, load_on_meta(folder, dtype))
    full = weights.read_weight(name)
    for part in parts(full.shape[dim]):
        cut = Cut(dim, part, tuple(full.shape))
        expected = full.narrow(dim, part.start, len(part))
        assert torch.equal(cut.scatter(full), expected)
        assert cut.part_shape == expected.shape
        reader, size = CutTensors(weights, {name: cut}), expected.numel()
        for start, stop in ((0, size), (7, size - 3), (size // 2, size)):  # as an engine's shards are
            out = torch.empty(stop - start, dtype=dtype)
            reader.fill(name, start, out)
            assert torch.equal(out, expected.flatten()[start:stop])
    norm = torch.empty(32, dtype=dtype)
    reader.fill("model.norm.weight", 0, norm)  # not cut
    assert torch.equal(norm, weights.read_weight("model.norm.weight"))


def test_parts_of_experts_are_read_from_the_stored_tensors_of_each_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrambled("mixtral").save_pretrained(tmp_path)  # stores w1, w2 and w3 of each expert
    model = load_on_meta(tmp_path, torch.float32)
    num_read, read = list[int](), lazy.read_stored
    monkeypatch.setattr(
        lazy,
        "read_stored",
        lambda files, stored, out, start: (num_read.append(len(out)), read(files, stored, out, start)),
    )
    weights = LazyTensors(tmp_path, model)
    experts = "model.layers.1.mlp.experts"
    for key, dim, pieces in (("gate_up_proj", 1, 2), ("down_proj", 2, 1)):
        full = weights.read_weight(f"{experts}.{key}")
        halves = full.chunk(pieces, dim)
        for part in parts(48):
            cut = Cut(dim, part, tuple(full.shape), pieces)
            expected = torch.cat([half.narrow(dim, part.start, len(part)) for half in halves], dim)
            assert torch.equal(cut.scatter(full), expected)
            assert cut.part_shape == expected.shape
            reader, size = CutTensors(weights, {f"{experts}.{key}": cut}), expected.numel()
            for start, stop in ((0, size), (7, size - 3), (size // 2, size)):
                num_read.clear()
                out = torch.empty(stop - start)
                reader.fill(f"{experts}.{key}", start, out)
                assert torch.equal(out, expected.flatten()[start:stop])
                assert key == "down_proj" or sum(num_read) == stop - start  # and nothing else of the files


def test_parts_join_to_the_full_tensor() -> None:
    full = torch.arange(2 * 12 * 3).view(2, 12, 3)
    cut, other = (Cut(1, part, (2, 12, 3), pieces=2) for part in (range(2), range(2, 6)))
    rest = other.scatter(full).unflatten(1, (2, 4))  # type: ignore[no-untyped-call]
    assert cut.size == 6
    assert torch.equal(cut.gather(cut.scatter(full), lambda part, dim, size: torch.cat([part, rest], dim)), full)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_a_part_that_several_ranks_have_is_in_the_full_tensor_once(copies: int) -> None:
    full = torch.arange(2 * 12 * 3).view(2, 12, 3)
    cuts = [CutDim(1, copies=copies).cut((2, 12, 3), Group(rank, 4)) for rank in range(4)]
    parts = [cut.scatter(full) for cut in cuts]
    assert all(torch.equal(part, parts[rank - rank % copies]) for rank, part in enumerate(parts))
    assert {part.shape[1] for part in parts} == {12 * copies // 4}

    def side_by_side(own: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        joined = torch.cat([part.unflatten(1, (1, len(cut.part))) for part, cut in zip(parts, cuts, strict=True)], dim)
        assert joined.shape[dim] == size
        return joined

    assert all(torch.equal(cut.gather(part, side_by_side), full) for cut, part in zip(cuts, parts, strict=True))
