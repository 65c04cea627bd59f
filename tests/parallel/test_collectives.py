"""What is sent is counted by the axis of the mesh it goes along: real processes, in groups that cross."""

import json
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from lorakit.errors import RunError
from lorakit.parallel.messages import Messages
from lorakit.parallel.verify import ExpectedLayout, verify_step
from tests.helpers.fork_server import start_python

RANK = """
import json, sys
import torch
import torch.distributed as dist
from lorakit.parallel.accounting import Collectives
from lorakit.parallel.group import Group
from lorakit.parallel.mesh import Mesh

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 4)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3), (0, 3), (1, 2))}
def mine(*choices):
    ranks = next(ranks for ranks in choices if rank in ranks)
    return Group(ranks.index(rank), 2, rank, groups[ranks])
data = mine((0, 2), (1, 3))
mesh = Mesh(data=data, tokens=data, tensor=mine((0, 1), (2, 3)))
counted = Collectives(4)
for _ in range(3):
    with counted.counting():
        mesh.data.all_reduce_sum(1.0, 2.0)
        mesh.tensor.all_reduce_sum(1.0)
        mesh.tensor.all_reduce_sum(1.0)
        if sys.argv[3] == "cross":
            mine((0, 3), (1, 2)).all_reduce_sum(1.0)
print(json.dumps({
    "axes": {axis: counted.counts(ranks) for axis, ranks in mesh.ranks.items()}, "all": counted.counts(),
    "ranks": mesh.ranks, "others": sorted(counted.groups() - set(mesh.ranks.values())),
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
        assert answer["ranks"] == {"tokens": [rank % 2, rank % 2 + 2], "tensor": [rank // 2 * 2, rank // 2 * 2 + 1]}
        assert answer["axes"] == {
            "tokens": {"all_reduce": {"calls": 1, "bytes": 16}}, "tensor": {"all_reduce": {"calls": 2, "bytes": 16}},
        }  # fmt: skip
        assert answer["all"] == {"all_reduce": {"calls": 3, "bytes": 32}}
        assert answer["others"] == []
    for rank, answer in enumerate(run_ranks(tmp_path, "cross")):
        assert answer["others"] == [[0, 3] if rank in (0, 3) else [1, 2]]


def test_a_message_that_goes_along_no_axis_ends_the_run() -> None:
    sent = {"all_reduce": {"calls": 1, "bytes": 800}}
    layout = {
        "engine": "DDP", "backend": "ddp", "mesh": {"data": 2, "sequence": 1}, "optimizer_bytes": 0,
        "collectives_by_axis": {"tokens": sent}, "groups_of_no_axis": [],
    }  # fmt: skip
    expected = ExpectedLayout("ddp", 2, 2, 1000, 800, 1000)
    verify_step(expected, {}, layout)
    with pytest.raises(RunError, match=r"among ranks \[\[0, 3\]\], which no axis"):
        verify_step(expected, {}, layout | {"groups_of_no_axis": [[0, 3]]})
    with pytest.raises(RunError, match="800 bytes should meet in a step, 0 bytes do"):
        verify_step(expected, {}, layout | {"collectives_by_axis": {"tokens": {}}})


def test_messages_that_layers_do_not_need_or_that_are_missing_end_the_run() -> None:
    """Along an axis, in number or in bytes, of a kind too many or too few."""
    expected = ExpectedLayout("ddp", 2, 1, 1000, 800, 1000)
    least = {"all_gather": Messages(3, 300), "all_reduce": Messages(1, 8)}
    bounds = {"tensor": (least, least | {"all_reduce": Messages(2, 16)})}

    def layout(**sent: tuple[int, int]) -> dict[str, Any]:
        by_kind = {kind: {"calls": calls, "bytes": num_bytes} for kind, (calls, num_bytes) in sent.items()}
        return {"engine": "DDP", "collectives_by_axis": {"tensor": by_kind}, "groups_of_no_axis": []}

    for reduced in ((1, 8), (2, 16)):
        verify_step(expected, bounds, layout(all_gather=(3, 300), all_reduce=reduced))
    for sent, message in (
        ({"all_gather": (3, 300)}, "along the axis `tensor` layers need 1 to 2 messages of the kind all_reduce in a step, 8 to 16"),
        ({"all_gather": (2, 300), "all_reduce": (1, 8)}, "3 messages of the kind all_gather in a step, 300 bytes, and 2 of 300 bytes are sent"),
        ({"all_gather": (3, 301), "all_reduce": (1, 8)}, "and 3 of 301 bytes are sent"),
        ({"all_gather": (3, 300), "all_reduce": (1, 8), "send": (1, 8)}, "layers need 0 messages of the kind send"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=message):
            verify_step(expected, bounds, layout(**sent))
