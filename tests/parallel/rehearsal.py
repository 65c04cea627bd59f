"""Rehearse runs of several ranks in one process, and count which are refused: `python -m tests.parallel.rehearsal`.

Each case is the view that one rank has of a run: a small model of an architecture, a backend with its axes, targets,
recomputation or none. torch's fake process group stands for the other ranks. What would arrive from them is zeros, or
a copy of what is sent, so values mean nothing here, and no check compares them; tests/parallel has real processes.

A line of JSON for each architecture, and at the end a table: accepted, refused and why, failed (no error of lorakit's).
"""

import argparse
import itertools
import json
import multiprocessing
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

SETTINGS: Final[dict[str, tuple[str, dict[str, int], int]]] = {
    "ddp tensor 2": ("ddp", {"tensor": 2}, 2),
    "ddp tensor 4": ("ddp", {"tensor": 4}, 4),
    "ddp sequence 2": ("ddp", {"sequence": 2}, 2),
    "ddp pipeline 2": ("ddp", {"pipeline": 2}, 2),
    "ddp tensor 2 x sequence 2": ("ddp", {"tensor": 2, "sequence": 2}, 4),
    "ddp pipeline 2 x sequence 2": ("ddp", {"pipeline": 2, "sequence": 2}, 4),
    "ddp 2 x 2 x 2": ("ddp", {"pipeline": 2, "sequence": 2, "tensor": 2}, 8),
    "fsdp2": ("fsdp2", {}, 8),
    "fsdp2 tensor 2": ("fsdp2", {"tensor": 2}, 4),
    "fsdp2 sequence 2": ("fsdp2", {"sequence": 2}, 4),
    "fsdp2 pipeline 2": ("fsdp2", {"pipeline": 2}, 4),
    "fsdp2 2 x 2 x 2": ("fsdp2", {"pipeline": 2, "sequence": 2, "tensor": 2}, 16),
}
"""name -> backend, axes, processes"""
WORK: Final[dict[str, dict[str, Any]]] = {
    "all-linear": {},
    "recomputed": {"checkpointing": True, "adapter": {"targets": ["q_proj", "v_proj"]}},
    "last layer, recomputed": {"checkpointing": True, "adapter": {"layers": [1]}},
}
RANKS: Final = ("first", "middle", "last")
ARCHITECTURES: Final = (
    "afmoe", "apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "minimax", "mistral",
    "mixtral", "nemotron", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "stablelm",
)  # fmt: skip
NUMBERS: Final = re.compile(r"(?<=[. ])\d+(?:,\d+)*")


@contextmanager
def one_of(num_ranks: int, rank: int) -> Iterator[None]:
    """Let this process be one of several ranks, to whom nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave_out_values() -> None:
    """Replace what depends on values of other ranks."""
    import torch.distributed as dist

    from lorakit.parallel.axis import Axis
    from lorakit.parallel.sums import LossAccumulator
    from lorakit.parallel.tensor.axis import ExpertChoices, TensorAxis

    dist.recv = lambda tensor, *args, **kwargs: tensor.zero_()
    dist.get_backend = lambda group=None: "gloo"  # one group for tensors and for counts, as with processes on CPUs
    TensorAxis.check_cut = Axis.check_cut
    ExpertChoices.before_experts = lambda choices, experts, args: None
    reduce = LossAccumulator.reduce  # a stage that is not the last would read the loss of the last one
    LossAccumulator.reduce = lambda sums, mesh: reduce(sums, mesh) if sums.terms else (0.0, {})


def rehearse(base: Path, name: str, work: dict[str, Any], which: str) -> None:
    """Take two steps of one rank of a run. Raises what the run would raise."""
    import torch

    from lorakit.errors import RunError
    from lorakit.ops.packed_attention import enable_packed_attention
    from lorakit.parallel import Group
    from lorakit.parallel.axis import check_axes
    from lorakit.parallel.fsdp2 import Fsdp2Engine
    from lorakit.parallel.group import make_mesh
    from lorakit.parallel.single import SingleEngine
    from lorakit.planning.skeleton import adapted_skeleton
    from lorakit.recipe import ParallelSection
    from tests.helpers.messages import recipe_of
    from tests.helpers.ranks import build

    backend, axes, size = SETTINGS[name]
    rank = {"first": 0, "middle": size // 2, "last": size - 1}[which]
    section = ParallelSection(backend=backend, processes=size, **axes)
    skeleton = adapted_skeleton(base, recipe_of(base, work))
    check_axes(skeleton.model, skeleton.spec, axes)
    with one_of(size, rank):
        group = Group(rank, size)
        mesh = make_mesh(group, section)
        kind = Fsdp2Engine if backend == "fsdp2" else SingleEngine
        engine = kind(section, torch.device("cpu"), group, mesh)
        build(engine, base, work)
        loss_model = engine._loss_model
        loss_model.packed_attention = enable_packed_attention(engine._model)
        for step in range(2):
            try:
                engine.step(step, [batch_of_two_rows(number) for number in range(2)])
            except (TypeError, ValueError) as problem:
                if "pipeline" not in axes:
                    raise
                # `check_stages` says so before the first step of a run
                raise RunError(f"parallel.pipeline: cannot be called in stages ({problem})") from problem


def batch_of_two_rows(number: int) -> Any:
    import torch

    from lorakit.data.batch import Batch

    ids = torch.arange(3, 15)[None] + number
    positions = torch.arange(6).repeat(2)[None]
    labels = torch.where(positions < 2, -100, ids + 1)
    labels[:, [5, 11]] = -100
    rows = 2 * number, 2 * number + 1
    return Batch(ids, labels, positions, None, rows, 12, (3, 3), torch.ones(2), (6, 6))


def try_architecture(name: str) -> dict[str, list[str]]:
    """Return outcome -> cases of an architecture; an outcome is `accepted`, or begins with `refused` or `failed`."""
    import torch
    import transformers

    from lorakit import LorakitError
    from lorakit.base.find import find_base
    from scripts.zoo.trial import make_small

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    leave_out_values()
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    outcomes: dict[str, list[str]] = {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(find_base("builtin:tiny"))
        base = make_small(name, tokenizer, folder / "base")
        for setting, (work, values), which in itertools.product(SETTINGS, WORK.items(), RANKS):
            try:
                rehearse(base, setting, values, which)
                outcome = "accepted"
            except LorakitError as problem:
                outcome = f"refused: {NUMBERS.sub('N', str(problem).splitlines()[0])[:160]}"
            except Exception as problem:
                outcome = f"failed: {type(problem).__name__}: {NUMBERS.sub('N', str(problem))[:160]}"
            outcomes.setdefault(outcome, []).append(f"{setting}, {work}, {which} rank")
    except Exception as problem:
        outcomes[f"absent: {type(problem).__name__}: {str(problem)[:160]}"] = ["all"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=ARCHITECTURES, help="architectures")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    total = Counter[str]()
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for name, outcomes in zip(options.names, pool.imap(try_architecture, options.names), strict=True):
            print(
                json.dumps({"name": name, **{outcome: len(cases) for outcome, cases in outcomes.items()}}), flush=True
            )
            total.update({outcome: len(cases) for outcome, cases in outcomes.items()})
    print(f"\n{sum(total.values()):,} cases")
    for outcome, number in total.most_common():
        print(f"{number:6,}  {outcome}")


if __name__ == "__main__":
    main()
