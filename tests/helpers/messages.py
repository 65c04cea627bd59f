"""The messages along each axis that a rank of a run should have sent, beside those that the rank has counted."""

from pathlib import Path
from typing import Any

import torch

from lorakit.parallel.pipeline.axis import split_layers
from lorakit.parallel.sequence.axis import checked_kv_repeats
from lorakit.parallel.tensor.plan import checked_plan, cut_dims
from lorakit.parallel.tensor.shards import CutDim
from lorakit.planning.activations import TracedModel
from lorakit.planning.estimate import stages_of
from lorakit.planning.skeleton import EMBEDDING, HEAD, ModelShapes, adapted_skeleton
from lorakit.recipe import AdapterSection, BaseSection, DataSection, Recipe
from tests.helpers.ranks import Case
from tests.parallel.axis_messages import (
    ByKind,
    CutModel,
    StepWork,
    pipeline_messages,
    sequence_messages,
    tensor_messages,
)

FLOAT = 4  # bytes of a value


def recipe_of(base: Path, case: Case) -> Recipe:
    """The recipe of a case's base and adapter."""
    settings = case.get("adapter", {}).items()
    lists_as_tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in settings}
    adapter = AdapterSection(rank=case.get("rank", 3), **lists_as_tuples)
    return Recipe(base=BaseSection(model=str(base)), adapter=adapter, data=DataSection(train="rows"), output="out")


def shapes_of_case(base: Path, case: Case, tensor: int) -> ModelShapes:
    """Rank 0's part of a case's base with its adapter, in float32."""
    return TracedModel(base, recipe_of(base, case), torch.float32, tensor=tensor).shapes


def assert_planned(base: Path, case: Case, rank: dict[str, Any]) -> None:
    """Assert that a rank's messages along each axis are those of the formulas, in number and bytes; in float32."""
    sizes = rank["mesh"]
    micro_batches, tokens = rank["counted_step"]["micro_batches"], rank["counted_step"]["tokens"]
    model = adapted_skeleton(base, recipe_of(base, case)).model
    whole = shapes_of_case(base, case, sizes["tensor"])
    ranges = split_layers(model, sizes["pipeline"], 1.0) if sizes["pipeline"] > 1 else [range(whole.num_layers)]
    number = rank["stage"]["number"] if "stage" in rank else 0
    shapes, is_first, is_last = stages_of(whole, ranges)[number], number == 0, number == len(ranges) - 1
    cut = cut_dims(model, checked_plan(model, sizes["tensor"]), sizes["tensor"])
    trains_embedding = is_first and any(EMBEDDING in shapes.uses.get(tensor, ()) for tensor in shapes.adapter)

    def planned(num_tokens: int) -> dict[str, ByKind]:
        step = StepWork(
            micro_batches=micro_batches, num_tokens=num_tokens, token_bytes=shapes.hidden_size * FLOAT,
            num_layers=shapes.num_layers, num_trained=shapes.num_layers, recomputes=case.get("checkpointing", False),
            is_first=is_first, is_last=is_last, sends_gradient=not is_first, receives_gradient=not is_last,
            trains_embedding=trains_embedding,
        )  # fmt: skip
        messages = {}
        if sizes["pipeline"] > 1:
            messages["pipeline"] = pipeline_messages(step)
        if sizes["sequence"] > 1:
            attentions = [(_attention_bytes(model, sizes), True)] * shapes.num_layers
            messages["sequence"] = sequence_messages(micro_batches, num_tokens, attentions, recomputes=step.recomputes)
        if sizes["tensor"] > 1:
            messages["tensor"] = tensor_messages(step, _cut_model(shapes, cut, is_first, is_last))
        return messages

    # a micro-batch that does not divide is padded: by up to a token for each rank
    padding = micro_batches * sizes["sequence"]
    least, most = planned(tokens), planned(tokens + padding)
    assert set(least) == {axis for axis in ("pipeline", "sequence", "tensor") if sizes[axis] > 1}
    for axis, by_kind in least.items():
        counted = dict(rank["collectives_by_axis"][axis])
        if axis == "pipeline":  # of whose ranks the losses and norms are exchanged too
            counted = {kind: counted[kind] for kind in counted if kind in ("send", "receive")}
        assert {kind: count["calls"] for kind, count in counted.items()} == {
            kind: messages.calls for kind, messages in by_kind.items()
        }, (case["name"], axis)
        for kind in counted.keys() - {"all_reduce"}:  # the number of labels is not known
            num_bytes = counted[kind]["bytes"]
            assert by_kind[kind].num_bytes <= num_bytes <= most[axis][kind].num_bytes, (case["name"], axis, kind)


def _attention_bytes(model: Any, sizes: dict[str, int]) -> int:
    """Bytes of a token in a layer's two messages: queries, keys and values there, outputs back."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = max(1, (getattr(config, "num_key_value_heads", None) or heads) // sizes["tensor"])
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads //= sizes["tensor"]
    repeats = checked_kv_repeats("the model", heads, kv_heads, sizes["sequence"])
    return int(2 * (heads + repeats * kv_heads) * size * FLOAT)


def _cut_model(shapes: ModelShapes, cut: dict[str, CutDim], is_first: bool, is_last: bool) -> CutModel:
    """A transformer with two blocks in a layer, whose first layer reads the embedding itself."""
    vocabulary = {use for name, tensor in shapes.tensors.items() if name in cut for use in shapes.uses.get(tensor, ())}
    return CutModel(
        num_blocks=2 * shapes.num_layers,
        num_summed=2 * shapes.num_layers,
        embedding=EMBEDDING in vocabulary and is_first,
        head=HEAD in vocabulary and is_last,
        uncut_bytes=sum(t.nbytes for name, t in shapes.tensors.items() if t.requires_grad and name not in cut),
    )
