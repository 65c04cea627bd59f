"""Every private name of another library that the engines need still exists in the installed version."""

import inspect
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lorakit.parallel import _internals


def test_torch_tells_forward_from_backward() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(_internals.is_in_backward()))
    seen.append(_internals.is_in_backward())
    (2 * x).backward()

    assert seen == [False, True]


def test_a_view_is_traced_to_its_tensor() -> None:
    weight = torch.ones(2, 3)

    assert _internals.base_of_view(weight.T) is weight
    assert _internals.base_of_view(weight) is None


def test_every_tensor_of_a_module_is_replaced() -> None:
    module = nn.BatchNorm1d(3)
    _internals.map_tensors(module, lambda tensor: tensor.to("meta"))

    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_torch_has_a_default_store() -> None:
    assert list(inspect.signature(torch.distributed.distributed_c10d._get_default_store).parameters) == []


def test_the_time_for_messages_is_set_in_every_group_that_has_formed() -> None:
    short = timedelta(seconds=5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=short)
    try:
        groups = [dist.group.WORLD, dist.new_group([0], timeout=short)]
        _internals.set_message_timeout(timedelta(days=30))

        for group in groups:
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(days=30)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The code in which DeepSpeed sets the attributes that the engines read."""
    from deepspeed import ops
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert issubclass(DeepSpeedZeroOptimizer, ZeROOptimizer)
    return {
        "parameter": inspect.getsource(Init),
        "stage 2": inspect.getsource(DeepSpeedZeroOptimizer),
        "stage 3": inspect.getsource(DeepSpeedZeroOptimizer_Stage3),
        "engine": inspect.getsource(DeepSpeedEngine),
        "operations": inspect.getsource(ops),
    }


@pytest.mark.parametrize(
    ("code", "pattern"),
    [
        ("parameter", r"def _convert_to_deepspeed_param\(self, param"),
        ("parameter", r"def partition\(param_list="),
        ("parameter", r"def all_gather\(param_list="),
        *(("parameter", rf"param\.{name} =") for name in ("ds_id", "ds_shape", "ds_tensor", "ds_persist")),
        ("stage 3", r"self\.persistent_parameters\[0\]\.all_gather\(self\.persistent_parameters\)"),
        ("stage 3", r"self\.fp32_partitioned_groups_flat ="),
        ("stage 2", r"self\.single_partition_of_fp32_groups ="),
        ("stage 2", r"def _lazy_init_hp_params_optimizer_state\(self\)"),
        *((stage, r"self\.loss_scaler\.cur_scale") for stage in ("stage 2", "stage 3")),
        *((stage, r"self\.overflow =") for stage in ("stage 2", "stage 3")),
        ("engine", r"def get_global_grad_norm\(self\)"),
        ("operations", "__compatible_ops__"),
    ],
)
def test_deepspeed_has_what_the_engines_read(sources: dict[str, str], code: str, pattern: str) -> None:
    assert re.search(pattern, sources[code])


def test_a_plain_parameter_is_not_sharded() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))

    assert _internals.shard_of(parameter) is None
    assert _internals.full_shape(parameter) == (2, 3)
