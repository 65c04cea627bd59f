"""What Slurm's variables say: node lists, tasks per node, a port of its own for every step. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Final

from lorakit.errors import RunError

FIRST_PORT: Final = 20000
NUM_PORTS: Final = 9000  # below Linux's ephemeral ports, and below torch's 29400 and 29500


def is_step(told: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several.

    An sbatch script and a salloc shell have SLURM_PROCID and SLURM_NTASKS too, but are no step; the shell of
    ``srun --pty bash`` is a step of one task.
    """
    return "SLURM_STEP_ID" in told and "SLURM_PROCID" in told and told.get("SLURM_STEP_NUM_TASKS") != "1"


def tasks_on_this_node(told: Mapping[str, str]) -> int:
    """The entry of this node in ``SLURM_STEP_TASKS_PER_NODE``, a list such as 2(x3),1.

    Raises:
        RunError: there is no such entry.
    """
    text, node = told.get("SLURM_STEP_TASKS_PER_NODE", ""), told.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        counts += [int(found[1])] * int(found[2] or 1) if found else []
    if not node.isdecimal() or int(node) >= len(counts):
        raise RunError(
            f"SLURM_NODEID={node} with SLURM_STEP_TASKS_PER_NODE={text!r}: no tasks are named for this node;"
            " start with `srun lorakit train` inside sbatch or salloc"
        )
    return counts[int(node)]


def first_host(told: Mapping[str, str], *, of_step: bool) -> str | None:
    """The first host of this step, or of the whole job; None outside Slurm.

    Raises:
        RunError: the list of nodes is none.
    """
    nodes = told.get("SLURM_STEP_NODELIST" if of_step else "SLURM_JOB_NODELIST")
    return node_names(nodes)[0] if nodes else None


def port_of(told: Mapping[str, str], *, of_step: bool) -> int | None:
    """A port from 20000 to 28999 that belongs to this job (and step); None outside Slurm."""
    job, step = told.get("SLURM_JOB_ID", ""), told.get("SLURM_STEP_ID", "") if of_step else "0"
    if not (job.isdecimal() and step.isdecimal()):
        return None
    return FIRST_PORT + (int(job) * 31 + int(step)) % NUM_PORTS


def node_names(text: str) -> list[str]:
    """The hosts of a node list: ``node[01-03,7],login`` is node01, node02, node03, node7, login.

    Raises:
        RunError: not a node list.
    """
    names = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            ends = [plain] if plain else [number for item in ranges.split(",") for number in _range(item, text)]
            expanded = [start + end for start in expanded for end in ends]
        names += expanded
    if not names or not text.count("[") == text.count("]") == len(re.findall(r"\[[^\[\]]*\]", text)):
        raise RunError(f"{text!r} is no Slurm node list")
    return names


def _range(item: str, text: str) -> list[str]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
    if found is None:
        raise RunError(f"{text!r} is no Slurm node list: {item!r} is no number or range")
    first, last = found[1], found[2] or found[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
