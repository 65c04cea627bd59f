"""What `lorakit plan` says that a rank of a run sends, beside what the rank has counted."""

from pathlib import Path
from typing import Any

import torch

from lorakit.planning.axes import axis_messages, planned_step
from lorakit.planning.model_shapes import read_shapes
from lorakit.planning.stages import stages_of
from lorakit.recipe import AdapterSection, BaseSection
from tests.helpers.ranks import Case

FLOAT = 4  # bytes of a value


def adapter_of(case: Case) -> AdapterSection:
    """The recipe's section of a case's adapter."""
    settings = case.get("adapter", {}).items()
    lists_as_tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in settings}
    return AdapterSection(rank=case.get("rank", 3), **lists_as_tuples)


def assert_planned(base: Path, case: Case, rank: dict[str, Any]) -> None:
    """Assert that a rank's messages along each axis are the planned ones, in number and bytes; in float32."""
    sizes = rank["mesh"]
    micro_batches, tokens = rank["counted_step"]["micro_batches"], rank["counted_step"]["tokens"]
    shapes = read_shapes(base, BaseSection(model="base"), adapter_of(case), torch.float32, sizes["tensor"])
    stages = stages_of(shapes.part(sizes["tensor"]), sizes["pipeline"], micro_batches, 1.0)
    stage = stages[rank["stage"]["number"] if "stage" in rank else 0]

    def planned(num_tokens: int) -> Any:
        step = planned_step(stage, micro_batches, num_tokens, FLOAT, recomputes=case.get("checkpointing", False))
        return axis_messages(stage, step, sizes)

    # a micro-batch that does not divide is padded: by up to a token for each rank
    padding = micro_batches * sizes["sequence"] * sizes["tensor"]
    least, most = planned(tokens), planned(tokens + padding)
    assert set(least) == {axis for axis in ("pipeline", "sequence", "tensor") if sizes[axis] > 1}
    for axis, by_kind in least.items():
        counted = dict(rank["collectives_by_axis"][axis])
        if axis == "pipeline":  # of whose ranks the losses and norms are exchanged too
            counted = {kind: counted[kind] for kind in counted if kind in ("send", "receive")}
        assert {kind: count["calls"] for kind, count in counted.items()} == {
            kind: messages.calls for kind, messages in by_kind.items()
        }, (case["name"], axis)
        for kind in counted.keys() - {"all_reduce"}:  # a plan does not know the labels
            num_bytes = counted[kind]["bytes"]
            assert by_kind[kind].num_bytes <= num_bytes <= most[axis][kind].num_bytes, (case["name"], axis, kind)
