"""A model with two adapters, and an engine, which the tests of a file share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from tests.helpers.patches import make_patch


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("patches")
    patches = {name: make_patch(base, folder / name, seed=seed) for seed, name in enumerate("ab")}
    return lorakit.load(base, patches, dtype="float32")


@pytest.fixture(scope="module")
def patches(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("patches")
    return {name: make_patch(base, folder / name, seed=seed) for seed, name in enumerate("abc")}


@pytest.fixture
def three_adapters(base: Path, patches: dict[str, Path]) -> AdaptedModel:
    """A model of the test's own, whose adapters it may replace; a file says ``model = three_adapters`` to use it."""
    return lorakit.load(base, patches, dtype="float32")


@pytest.fixture(scope="module")
def engine(model: AdaptedModel) -> Iterator[ServingEngine]:
    opened = ServingEngine(model, max_rows=4)
    yield opened
    opened.close()
