"""Set DeepSpeed up: its configuration from a recipe.

Every value that changes the result is set here, because DeepSpeed's and accelerate's defaults would change it.
"""

from typing import Any, Final

from lorakit.recipe import ParallelSection

MEGABYTE: Final = 1_000_000
BYTES_PER_VALUE: Final = 4  # gradients are float32


def deepspeed_config(parallel: ParallelSection, world_size: int) -> dict[str, Any]:
    """Return the full configuration."""
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
        zero["offload_optimizer"] = {"device": offloads.optimizer}
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
            zero["offload_param"] = {"device": offloads.parameters}
    return {
        # DeepSpeed must not divide by a number of micro-batches: the step divides by label tokens (engine.py)
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
