"""What is sent is counted by the axis it goes along, and errors arrive whole: real processes, in groups that cross."""

import json
import pickle
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from lorakit.decoding import generation  # noqa: F401  (its errors and those of the server are among the subclasses)
from lorakit.errors import LorakitError, PeerFailure
from lorakit.patch.same_base import RefusedBaseError
from lorakit.serving import engine, errors  # noqa: F401
from tests.helpers.fork_server import start_python
from tests.parallel.axis_bounds import differences
from tests.parallel.axis_messages import Messages

RANK = """
import json, sys
import torch
import torch.distributed as dist
from benchmarks.collectives import count_collectives, ranks_by_axis
from lorakit.parallel.group import Group, SentTensors
from lorakit.parallel.group import Mesh
from lorakit.patch.same_base import RefusedBaseError

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 4)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3), (0, 3), (1, 2))}
def mine(*choices):
    ranks = next(ranks for ranks in choices if rank in ranks)
    return Group(ranks.index(rank), 2, rank, groups[ranks])
data = mine((0, 2), (1, 3))
mesh = Mesh(data=data, replicas=data, tensor=mine((0, 1), (2, 3)))
if sys.argv[3] == "error":
    def work():
        if rank > 0:
            raise RefusedBaseError(f"other base {rank}", "base")
    try:
        Group(rank, 4, rank).run_on_all(work)
    except RefusedBaseError as problem:
        print(json.dumps([str(problem), problem.problem]))
    sys.exit()
if sys.argv[3] == "tensors":
    saved = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor(7)}
    with count_collectives() as counted:
        received = dict(SentTensors(Group(rank, 4, rank), saved if rank == 0 else None))
        assert received.keys() == saved.keys() and all(torch.equal(received[name], saved[name]) for name in saved)
else:
    with count_collectives() as counted:
        mesh.data.all_reduce_sum(1.0, 2.0)
        mesh.tensor.all_reduce_sum(1.0)
        mesh.tensor.all_reduce_sum(1.0)
        if sys.argv[3] == "cross":
            mine((0, 3), (1, 2)).all_reduce_sum(1.0)
print(json.dumps({
    "axes": counted.by_axis(mesh), "all": counted.counts(),
    "ranks": ranks_by_axis(mesh), "others": counted.groups_of_no_axis(mesh),
}))
dist.destroy_process_group()
"""


def run_ranks(folder: Path, choice: str) -> list[dict[str, Any]]:
    arguments = (folder / choice, choice)
    started = [start_python("-c", RANK, rank, *arguments, stdout=PIPE, stderr=PIPE) for rank in range(4)]
    answers = [process.communicate(90) for process in started]
    assert [process.wait() for process in started] == [0] * 4, answers
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


@pytest.mark.spread
def test_messages_are_counted_by_the_axis_they_go_along(tmp_path: Path) -> None:
    for rank, answer in enumerate(run_ranks(tmp_path, "along")):
        assert answer["ranks"] == {"replicas": [rank % 2, rank % 2 + 2], "tensor": [rank // 2 * 2, rank // 2 * 2 + 1]}
        assert answer["axes"] == {
            "replicas": {"all_reduce": {"calls": 1, "bytes": 16}}, "tensor": {"all_reduce": {"calls": 2, "bytes": 16}},
        }  # fmt: skip
        assert answer["all"] == {"all_reduce": {"calls": 3, "bytes": 32}}
        assert answer["others"] == []
    for rank, answer in enumerate(run_ranks(tmp_path, "cross")):
        assert answer["others"] == [[0, 3] if rank in (0, 3) else [1, 2]]


@pytest.mark.spread
def test_a_checkpoints_tensors_are_sent_one_at_a_time(tmp_path: Path) -> None:
    """Not all of them in one pickle, of which a process would have several copies to store a part."""
    for answer in run_ranks(tmp_path, "tensors"):
        sent = answer["all"]["broadcast"]
        assert sent["calls"] == 2 + 2  # names and shapes (their size before them), and two tensors
        assert sent["bytes"] < 6 * 4 + 8 + 1000


def test_messages_outside_their_bounds_are_named_by_axis_and_kind() -> None:
    least = {"all_gather": Messages(3, 300), "all_reduce": Messages(1, 8)}
    most = least | {"all_reduce": Messages(2, 16)}

    def problems(**sent: tuple[int, int]) -> list[str]:
        counts = {kind: {"calls": calls, "bytes": num_bytes} for kind, (calls, num_bytes) in sent.items()}
        return list(differences("tensor", least, most, counts))

    assert problems(all_gather=(3, 300), all_reduce=(1, 8)) == problems(all_gather=(3, 300), all_reduce=(2, 16)) == []
    assert problems(all_gather=(3, 300)) == ["along tensor: 0 all_reduce of 0 bytes, not 1 to 2 of 8 to 16"]
    assert problems(all_gather=(3, 301), all_reduce=(1, 8)) == [
        "along tensor: 3 all_gather of 301 bytes, not 3 to 3 of 300 to 300"
    ]
    assert problems(all_gather=(3, 300), all_reduce=(1, 8), send=(1, 8)) == [
        "along tensor: 1 send of 8 bytes, not 0 to 0 of 0 to 0"
    ]


@pytest.mark.spread
def test_an_error_of_one_rank_is_raised_on_all_with_what_it_carries(tmp_path: Path) -> None:
    text = "other base 1; to use it all the same, pass --allow base (in Python allow={'base'})"
    assert [tuple(error) for error in run_ranks(tmp_path, "error")] == [
        (text if rank == 1 else f"rank 1: {text}", "other base 1") for rank in range(4)
    ]


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


@pytest.mark.parametrize("cls", sorted(subclasses(LorakitError), key=lambda cls: cls.__name__))
def test_every_error_goes_from_process_to_process(cls: type[LorakitError]) -> None:
    arguments: dict[type, tuple[Any, ...]] = {PeerFailure: ("what", 75), RefusedBaseError: ("what", "base")}
    error = cls(*arguments.get(cls, ("what",)))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (cls, str(error), vars(error))
    assert copy.exit_code == error.exit_code
