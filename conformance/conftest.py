"""One server for all cases, and another one for the program that sends whatever it likes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # before they are imported

import pytest

from conformance.server import API_KEY, ROOT, Server, running


@pytest.fixture(scope="session")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of patches that may be loaded: `json`, `pirate`, and `damaged`, whose config is no JSON."""
    folder = tmp_path_factory.mktemp("patches")
    for name in ("json", "pirate"):
        shutil.copytree(ROOT / "adapters" / name, folder / name)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "adapter_config.json").write_text("this is no JSON")
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, patches: Path) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server") / "log", patches, "--api-key", API_KEY) as started:
        yield started


@pytest.fixture(scope="session")
def open_server(tmp_path_factory: pytest.TempPathFactory, patches: Path) -> Iterator[Server]:
    """A server without API keys, and of little memory, so that answers are short and rows are preempted."""
    with running(tmp_path_factory.mktemp("open") / "log", patches, "--kv-positions", "160") as started:
        yield started
