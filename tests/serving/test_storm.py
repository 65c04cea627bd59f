"""A storm of requests, cancels, and adapters that come, change under their names and go: every answer is Python's."""

import contextlib
import random
from pathlib import Path

import pytest

import lorakit
from lorakit.decoding import batch as batch_module
from lorakit.decoding.generation import Generation
from lorakit.decoding.sampling import SamplingSettings
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.engine import ServingEngine
from tests.helpers.patches import make_patch
from tests.helpers.serving import wait_until

RANKS = (1, 4, 4, 9, 16)
REQUESTS = 70


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    return {f"v{seed}": make_patch(base, folder / f"v{seed}", seed=seed, rank=rank) for seed, rank in enumerate(RANKS)}


@pytest.mark.parametrize(
    ("positions", "happens"), [(150, "preemptions"), pytest.param(4000, "cached tokens", marks=pytest.mark.matrix)]
)
def test_every_answer_of_a_storm_is_the_one_that_python_gives_alone(
    base: Path, versions: dict[str, Path], positions: int, happens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "HEADROOM_TOKENS", 4)  # so that rows are admitted that must leave again
    model, alone = (lorakit.load(base, patches, dtype="float32") for patches in ({}, versions))
    chooser = random.Random(positions)
    current: dict[str, str] = {}  # name -> the version that it has
    requests: list[tuple[Generation, str | None]] = []
    beginnings = [[chooser.randrange(5, 3000) for _ in range(24)] for _ in range(3)]  # which prompts share

    with contextlib.closing(ServingEngine(model, max_rows=4, max_positions=positions)) as engine:
        while len(requests) < REQUESTS:
            change_an_adapter(model, current, versions, chooser)
            name = chooser.choice([None, *current])
            prompt = chooser.choice(beginnings)[: chooser.randint(1, 24)] + chooser.choices(range(5, 3000), k=3)
            settings = SamplingSettings(
                max_tokens=chooser.randint(8, 40), temperature=chooser.choice((0.0, 1.0)), seed=chooser.randrange(9)
            )
            version = None if name is None else current[name]
            requests.append((engine.submit(prompt, name, settings, client=chooser.choice("xy")), version))
            if chooser.random() < 0.1:
                chooser.choice(requests)[0].cancel()
            if chooser.random() < 0.05:
                earlier = chooser.choice(requests)[0]
                wait_until(lambda earlier=earlier: earlier.reason is not None)  # type: ignore[misc]
        answers = [generation.ids() for generation, _ in requests]
        totals, finished = engine.totals, engine.finished

    assert totals["failed_steps"] == 0
    cached_tokens = sum(generation.cached_tokens or 0 for generation, _ in requests)
    assert {"preemptions": totals["preemptions"], "cached tokens": cached_tokens}[happens] > 0
    assert finished["cancelled"] < REQUESTS / 3
    with contextlib.closing(ServingEngine(alone, max_rows=1)) as one_at_a_time:
        for (generation, version), answer in zip(requests, answers, strict=True):
            prompt, settings = generation.prompt, generation.settings
            if settings.temperature == 0:
                expected = alone.generate_ids([prompt], version, max_new_tokens=settings.max_tokens)[0]
            else:
                expected = one_at_a_time.submit(prompt, version, settings).ids()
            assert answer == (expected[: len(answer)] if generation.is_cancelled else expected), (version, prompt)


def change_an_adapter(
    model: AdaptedModel, current: dict[str, str], versions: dict[str, Path], chooser: random.Random
) -> None:
    """Load, replace or unload an adapter, now and then."""
    name, chance = chooser.choice("abc"), chooser.random()
    if chance < 0.15:
        current[name] = chooser.choice([*versions])
        model.load_adapter(name, versions[current[name]], replace=True)
    elif chance < 0.2 and name in current:
        del current[name]
        model.unload_adapter(name)
