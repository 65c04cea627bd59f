"""A process's memory is its own."""

import subprocess
import sys

import pytest
import torch

from lorakit.run.display import peak_resident_bytes
from tests.helpers.memory import rss_bytes


def test_what_was_held_and_freed_is_in_the_peak_alone() -> None:
    held = torch.ones(100_000_000)  # 400 MB
    del held

    assert peak_resident_bytes() >= 400_000_000
    assert peak_resident_bytes() >= rss_bytes() + 300_000_000


@pytest.mark.matrix
def test_the_peak_of_the_process_that_started_this_one_does_not_count() -> None:
    held = torch.ones(300_000_000)  # 1.2 GB
    code = "from lorakit.run.display import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del held

    assert 1_000_000 < int(done.stdout) < 900_000_000
