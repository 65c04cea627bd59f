"""Kernels of 16-bit products on CPUs: a run stores few of them, unless the user's variables say otherwise."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lorakit.launch.libraries import LIMITS, limit_kernel_caches

PRODUCTS = """
import sys, torch
from tests.helpers.memory import rss_bytes
from lorakit.training.start import train

train(sys.argv[1])
weight = torch.ones(64, 64, dtype=torch.bfloat16)
_ = weight @ weight
before = rss_bytes()
for num_rows in range(100, 700):
    _ = torch.ones(num_rows, 64, dtype=torch.bfloat16) @ weight
print(rss_bytes() - before)
"""


@pytest.mark.matrix
def test_products_of_ever_new_shapes_do_not_fill_the_memory_of_a_run(recipe: Callable[..., Path]) -> None:
    path = recipe(train={"steps": 1, "warmup_steps": 0}, data={"eval": None})
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS}
    # a process of its own, because the library reads its limits once
    done = subprocess.run([sys.executable, "-c", PRODUCTS, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 120e6  # 360 MB with the library's own limits, where it compiles kernels


def test_the_users_own_limits_are_obeyed() -> None:
    older = {"DNNL_PRIMITIVE_CACHE_CAPACITY": "7"}
    newer = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "2000", "LRU_CACHE_CAPACITY": "9"}

    limit_kernel_caches("float32", older)
    limit_kernel_caches("float32", newer)

    assert older["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert newer == {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "2000", "LRU_CACHE_CAPACITY": "9"}
