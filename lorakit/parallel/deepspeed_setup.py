"""Set DeepSpeed up: its configuration from a recipe, and what it needs on this machine.

Every value that changes the result is set here, because DeepSpeed's and accelerate's defaults would change it. A
missing requirement is an error here, with its remedy, and never a hang or a traceback later.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any, Final

from lorakit.errors import RecipeError, RunError
from lorakit.parallel._internals import extension_folder
from lorakit.recipe import ParallelSection

MEGABYTE: Final = 1_000_000
BYTES_PER_VALUE: Final = 4  # gradients are float32


def deepspeed_config(parallel: ParallelSection, world_size: int) -> dict[str, Any]:
    """Return the full configuration. Raises RecipeError: a key of `parallel.deepspeed` contradicts the recipe."""
    stage = parallel.facts.zero_stage
    offloads = parallel.offloads
    bucket = max(1, round(parallel.bucket_mb * MEGABYTE / BYTES_PER_VALUE))
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if offloads.optimizer != "none":
        zero["offload_optimizer"] = {"device": offloads.optimizer, "nvme_path": parallel.nvme_path}
    if stage == 3:
        prefetch = round(parallel.prefetch_mb * MEGABYTE / 2)  # in elements of two bytes
        zero |= {
            "stage3_prefetch_bucket_size": prefetch,
            # the default, 1e5 elements, would leave norms and small weights of the base gathered on every rank
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": max(1, prefetch),
            # free a layer right after use, though the next one to need it may be close: memory over messages
            "stage3_max_reuse_distance": 0,
        }
        if offloads.parameters != "none":
            zero["offload_param"] = {"device": offloads.parameters, "nvme_path": parallel.nvme_path}
    config: dict[str, Any] = {
        # DeepSpeed must not divide by a number of micro-batches: the step divides by label tokens (stepping.py)
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        # set, because accelerate's plugin makes it 1.0 otherwise; `ZeroEngine.wrap` writes the recipe's value
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # True refuses torch's AdamW under offload
        "zero_optimization": zero,
    }
    return merge_config(config, dict(parallel.deepspeed), "parallel.deepspeed")


def merge_config(ours: dict[str, Any], theirs: dict[str, Any], path: str) -> dict[str, Any]:
    """Merge two configurations. Raises RecipeError: a key has two values, or is in REFUSED. path: of `theirs`."""
    result = dict(ours)
    for key, value in theirs.items():
        where = f"{path}.{key}"
        if key not in ours:
            if path == "parallel.deepspeed" and key in REFUSED:
                raise RecipeError(f"{where}: {REFUSED[key]}")
            result[key] = value
        elif isinstance(ours[key], dict) and isinstance(value, dict):
            result[key] = merge_config(ours[key], value, where)
        elif ours[key] != value:
            raise RecipeError(f"{where}: {value!r} contradicts the recipe, which makes it {ours[key]!r}; remove it")
    return result


REFUSED: Final = {
    "fp16": "base.dtype chooses the precision",
    "bf16": "base.dtype chooses the precision",
    "amp": "base.dtype chooses the precision",
    "torch_autocast": "base.dtype chooses the precision",
    "optimizer": "train.optimizer chooses the optimizer",
    "scheduler": "train.schedule chooses the schedule",
    "prescale_gradients": "it changes how gradients are added up",
    "gradient_predivide_factor": "it changes how gradients are added up",
    "communication_data_type": "gradients are added up in float32",
    "data_types": "gradients are added up in float32",
    "activation_checkpointing": "train.activation_checkpointing chooses it",
    "elasticity": "lorakit resumes on any number of processes by itself",
    "tensor_parallel": "it is not supported",
    "pipeline": "it is not supported",
}


def check_deepspeed(parallel: ParallelSection) -> None:
    """Raise RunError or RecipeError unless DeepSpeed can run this recipe here."""
    deepspeed_config(parallel, parallel.processes)
    if importlib.util.find_spec("deepspeed") is None:
        raise RunError(
            f"parallel.backend: {parallel.backend} needs DeepSpeed: pip install 'lorakit[deepspeed]', or choose ddp or"
            " fsdp2, which need nothing more"
        )
    if parallel.nvme_path is None:
        return
    lock = extension_folder("async_io") / "lock"  # the only operation that is compiled
    if lock.exists():
        raise RunError(
            f"{lock}: another run compiles DeepSpeed's async_io, or such a compile was cut off and left this lock, for"
            f" which every later run would wait for ever. If no other run is starting, remove it: rm {lock}"
        )
    folder = Path(parallel.nvme_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"parallel.nvme_path: {folder}: {problem.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise RunError(f"parallel.nvme_path: {folder} cannot be written")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise RunError(
            "parallel.offload: nvme needs libaio and a C++ compiler (Debian: apt-get install libaio-dev g++);"
            " offload: cpu needs neither"
        )
