"""Read Slurm's environment variables: node lists, tasks per node, and a port derived from job and step numbers.

Invariant: every task of a step computes the same first host and the same port. Imports no torch.
"""

import re
from collections.abc import Mapping
from typing import Final

from lorakit.errors import RunError

FIRST_PORT: Final = 20000
NUM_PORTS: Final = 9000  # ends below torch's default ports 29400 and 29500, and below Linux's ephemeral ports (32768)


def is_step(env: Mapping[str, str]) -> bool:
    """True if srun started this process as one of several tasks.

    SLURM_PROCID and SLURM_NTASKS are also set in sbatch scripts and salloc shells, which are no step. The shell of
    ``srun --pty bash`` is a step of one task.
    """
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS") != "1"


def tasks_on_this_node(env: Mapping[str, str]) -> int:
    """Return this node's entry of ``SLURM_STEP_TASKS_PER_NODE``, a list such as ``2(x3),1``.

    Raises:
        RunError: the list has no entry for this node.
    """
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = env.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if not node.isdecimal() or int(node) >= len(counts):
        raise RunError(
            f"SLURM_NODEID={node} with SLURM_STEP_TASKS_PER_NODE={text!r}: no tasks are named for this node;"
            " start with `srun lorakit train` inside sbatch or salloc"
        )
    return counts[int(node)]


def first_host(env: Mapping[str, str], *, of_step: bool) -> str | None:
    """Return the first host of this step, or of the job; None outside Slurm.

    Raises:
        RunError: the variable is no node list.
    """
    nodes = env.get("SLURM_STEP_NODELIST" if of_step else "SLURM_JOB_NODELIST")
    return node_names(nodes)[0] if nodes else None


def job_port(env: Mapping[str, str], *, of_step: bool) -> int | None:
    """Return a port from 20000 to 28999 computed from the numbers of job and step (or job alone); None outside Slurm.

    The tasks cannot exchange a port before they have met, so each computes it. Two jobs on one host seldom share it.
    """
    job = env.get("SLURM_JOB_ID", "")
    step = env.get("SLURM_STEP_ID", "") if of_step else "0"
    if not (job.isdecimal() and step.isdecimal()):
        return None
    return FIRST_PORT + (int(job) * 31 + int(step)) % NUM_PORTS


def node_names(text: str) -> list[str]:
    """Return the hosts of a node list: ``node[01-03,7],login`` is node01, node02, node03, node7, login.

    Raises:
        RunError: ``text`` is no node list.
    """
    names = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            ends = [plain] if plain else [number for item in ranges.split(",") for number in _expand_range(item, text)]
            expanded = [start + end for start in expanded for end in ends]
        names += expanded
    if not names or not text.count("[") == text.count("]") == len(re.findall(r"\[[^\[\]]*\]", text)):
        raise RunError(f"{text!r} is no Slurm node list")
    return names


def _expand_range(item: str, text: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
    if match is None:
        raise RunError(f"{text!r} is no Slurm node list: {item!r} is no number or range")
    first = match[1]
    last = match[2] or first
    # node names keep leading zeros: node[08-10] is node08, node09, node10
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
