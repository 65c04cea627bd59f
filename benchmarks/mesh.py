"""The gradients of eight processes along three axes beside those of one (P4): data 2 x pipeline 2 x tensor 2.

    python -m benchmarks.mesh [--keep]

Gradients of one step of eight rows, from the same A and B. How far float32 itself is off is measured by the same
gradients in float64: row by row, of transformers' own model with W + s B A as its weights. "Off" is the largest, over
all tensors, of |gradient - other| / |other|. Two results that are no further off than float32 is are at most twice that
apart.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaForCausalLM

from benchmarks.machine import program, run_ranks, scratch, table
from benchmarks.models import SHAPES, make_base, random_adapter
from benchmarks.ranks import RANK, prepared
from benchmarks.rows import Rows, packed, random_rows
from lorakit.lora import AdapterSpec, find_targets
from lorakit.parallel import EngineState

SHAPE = "tiny"
LENGTHS = (40, 24, 33, 15, 16, 61, 3, 50)
ROWS_AT_A_TIME = 2
AXES = {"pipeline": 2, "tensor": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"backend": "ddp"}),
    "ddp, 2 x 2 x 2": (8, {"backend": "ddp", **AXES}),
    "fsdp2, 2 x 2 x 2": (8, {"backend": "fsdp2", **AXES}),
}
"""name -> processes, and keys of a recipe's section"""
FIGURE = "gradients off one process / one process off float64"


def rows() -> Rows:
    """The rows of the step; of each the last half has labels."""
    return random_rows(SHAPES[SHAPE]["vocab_size"], LENGTHS, 0, 0.5)


def rank(layout: str, base: str, gradients: str) -> None:
    """One of the processes: one step; the first process writes the gradients, and prints what the largest holds."""
    processes, keys = LAYOUTS[layout]
    # the first step's momentum of SGD is the gradient, and every engine gathers its optimizer's state
    with prepared(Path(base), optimizer="sgd", clip=None, processes=processes, **keys) as ready:
        engine, data = ready.engine, ready.engine.mesh.data
        adapter = random_adapter(ready.targets, RANK, seed=0, size=1e-2)
        engine.load_state_dict(EngineState(adapter, {}))
        batches = [packed(rows()[start : start + ROWS_AT_A_TIME]) for start in range(0, len(LENGTHS), ROWS_AT_A_TIME)]
        loss = engine.step(0, batches[data.rank :: data.size]).loss
        state = engine.state_dict().optimizer
        layout_facts = engine.layout()
        base_bytes = ready.largest(layout_facts["base_bytes"])
        if engine.group.rank == 0:
            torch.save({name: state[f"{name}.momentum_buffer"] for name in adapter}, gradients)
        ready.report(loss=loss, mesh=layout_facts["mesh"], base_bytes=base_bytes)


class Norm(nn.Module):
    """RMSNorm in its input's dtype; transformers' computes in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(weight, requires_grad=False), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def exact_gradients(base: Path) -> dict[str, Tensor]:
    """The gradients in float64."""
    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=torch.float64).requires_grad_(False)
    targets = find_targets(model, AdapterSpec(rank=RANK))
    factors = {name: each.double().requires_grad_() for name, each in random_adapter(targets, RANK, 0, 1e-2).items()}
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            model.set_submodule(name, Norm(module.weight, module.variance_epsilon))
    scale = AdapterSpec(rank=RANK).alpha / RANK
    num_labels = sum(int(row.label_mask[1:].sum()) for row in rows())
    for row in rows():
        merged = {
            f"{one.name}.weight": model.get_submodule(one.name).weight
            + scale * factors[f"{one.name}.lora_B"] @ factors[f"{one.name}.lora_A"]
            for one in targets
        }
        ids, label_mask = torch.from_numpy(row.ids), torch.from_numpy(row.label_mask)
        logits = functional_call(model, merged, (ids[None],)).logits[0, :-1]
        loss = F.cross_entropy(logits, torch.where(label_mask, ids, -100)[1:], reduction="sum") / num_labels
        loss.backward()
    return {name: each.grad for name, each in factors.items() if each.grad is not None}


def distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """How far some are off: the largest of any tensor."""
    pairs = [(some[name].double(), other.double()) for name, other in others.items()]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def measure() -> dict[str, Any]:
    """Each layout once."""
    base = make_base(scratch(), SHAPE, torch.float32)
    measured: dict[str, Any] = {"shape": SHAPE}
    gradients = {"float64": exact_gradients(base)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (processes, _) in LAYOUTS.items():
            path = Path(folder) / "gradients.pt"
            measured[name] = run_ranks("benchmarks.mesh", processes, name, str(base), str(path))
            gradients[name] = torch.load(path)
    alone, *_ = LAYOUTS
    for name in LAYOUTS:
        measured[name]["off_float64"] = distance(gradients[name], gradients["float64"])
        measured[name]["off_one_process"] = distance(gradients[name], gradients[alone])
    return measured


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures that the target speaks of."""
    alone, *others = LAYOUTS
    floor = result[alone]["off_float64"]
    return {f"{name}: {FIGURE}": result[name]["off_one_process"] / floor for name in others}


def show(result: dict[str, Any]) -> None:
    """The table."""
    lines = [("", "loss", "base, MB", "gradients off float64", "off one process")]
    for name in LAYOUTS:
        one = result[name]
        distances = (f"{one['off_float64']:.1e}", f"{one['off_one_process']:.1e}")
        lines.append((name, f"{one['loss']:.6f}", f"{one['base_bytes'] / 1e6:.1f}", *distances))
    table(lines)
    for name, value in rates(result).items():
        print(f"{name} {value:.3f}")


if __name__ == "__main__":
    program("mesh", measure, show, rank)
