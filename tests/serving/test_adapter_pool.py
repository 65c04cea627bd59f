"""More adapters than memory has room for: those used least recently wait on disk, and answer as before."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lorakit
from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import LorakitError, PatchError, TemporaryFailure
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.http_server import serving
from tests.helpers.patches import make_patch, without_facts

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def copies(patches: dict[str, Path], base: Path, tmp_path: Path) -> dict[str, Path]:
    """Patches that a test may change."""
    sources = {**patches, "d": make_patch(base, tmp_path / "d0", seed=9)}
    return {name: Path(shutil.copytree(sources[name], tmp_path / name)) for name in NAMES}


@pytest.fixture
def empty(base: Path) -> AdaptedModel:
    return lorakit.load(base, dtype="float32")


@pytest.fixture
def pool(empty: AdaptedModel, copies: dict[str, Path]) -> AdapterPool:
    pool = AdapterPool(empty, max_resident=2)
    for name, folder in copies.items():
        pool.load(name, folder)
    return pool


def resident(pool: AdapterPool) -> set[str]:
    return {name for name in NAMES if pool.model.is_loaded(name)}


def test_the_least_recently_used_adapters_are_on_disk(pool: AdapterPool) -> None:
    assert resident(pool) == {"c", "d"}
    for name in ("c", "a"):
        pool.adapter(name)
    assert resident(pool) == {"a", "c"}  # d was used before c
    assert {*pool.names} == {*NAMES} == {*pool.sources()}


def test_an_adapter_gets_the_memory_of_the_one_that_leaves(empty: AdaptedModel, copies: dict[str, Path]) -> None:
    def num_columns() -> int:
        return sum(block.A.shape[:2].numel() for bank in empty._banks.values() for block in bank.taken)

    pool = AdapterPool(empty, max_resident=2)
    pool.load("a", copies["a"])
    pool.load("b", copies["b"])
    of_two = num_columns()

    pool.load("c", copies["c"])
    assert num_columns() == of_two
    assert pool.adapter("a") is not None
    assert num_columns() == of_two


def test_an_adapter_that_was_evicted_serves_those_who_have_it(empty: AdaptedModel, pool: AdapterPool) -> None:
    expected = {name: pool.adapter(name) for name in ("a", "b", "c")}
    assert len(resident(pool)) == 2
    engine = ServingEngine(empty)
    early = engine.submit([5, 6], expected["a"], SamplingSettings(max_tokens=4)).ids()
    assert engine.submit([5, 6], pool.adapter("a"), SamplingSettings(max_tokens=4)).ids() == early
    engine.close()
    assert pool.adapter(None) is None


def test_a_pinned_adapter_stays_in_memory_until_it_is_unloaded(empty: AdaptedModel, copies: dict[str, Path]) -> None:
    pool = AdapterPool(empty, max_resident=2, pinned=["a", "a"])
    for name, folder in copies.items():
        pool.load(name, folder)
    pool.check_pinned()
    assert resident(pool) == {"a", "d"}
    for name in ("b", "c"):
        pool.adapter(name)
    assert resident(pool) == {"a", "c"}

    pool.remove("a")
    for name in ("b", "d"):
        pool.adapter(name)
    assert resident(pool) == {"b", "d"}
    with pytest.raises(LorakitError, match="--pin a: no adapter of that name is loaded"):
        pool.check_pinned()

    pool.load("a", copies["a"])  # the name is pinned, whichever patch it has
    for name in ("b", "c", "d"):
        pool.adapter(name)
    assert "a" in resident(pool)


def test_the_server_says_which_adapters_are_pinned(empty: AdaptedModel, copies: dict[str, Path]) -> None:
    pool = AdapterPool(empty, max_resident=1, pinned=["b"])
    for name in ("a", "b", "c"):
        pool.load(name, copies[name])
    engine = ServingEngine(empty)
    app = OpenAIServer(empty, engine, "tiny", admin_key="root", pool=pool).app
    with serving(app) as address:
        body = {"model": "a", "prompt": "hi", "max_tokens": 1}
        assert patient.post(f"{address}/v1/completions", json=body).status_code == 200  # beyond what is pinned
        facts = {one["name"]: one for one in patient.get(f"{address}/v1/adapters").json()["data"]}
        headers = {"Authorization": "Bearer root"}
        unload = patient.post(f"{address}/v1/unload_lora_adapter", json={"lora_name": "b"}, headers=headers)
        names = [one["name"] for one in patient.get(f"{address}/v1/adapters").json()["data"]]
    engine.close()
    assert {name: one["pinned"] for name, one in facts.items()} == {"a": False, "b": True, "c": False}
    assert facts["b"]["state"] == "loaded"
    assert (unload.status_code, sorted(names)) == (200, ["a", "c"])


def test_changed_or_missing_files_are_refused_and_a_new_load_serves_them(
    pool: AdapterPool, copies: dict[str, Path]
) -> None:
    for file in copies["b"].iterdir():
        shutil.copy(file, copies["a"])
    shutil.rmtree(copies["b"])
    with pytest.raises(TemporaryFailure, match="'a' cannot be read: its files changed since it was loaded"):
        pool.adapter("a")
    with pytest.raises(TemporaryFailure, match="'b' cannot be read: b: no such folder"):
        pool.adapter("b")
    assert pool.failed.keys() == {"a", "b"}
    assert resident(pool) == {"c", "d"}
    with pytest.raises(PatchError, match="'a' is taken"):
        pool.load("a", copies["a"])

    pool.load("a", copies["a"], replace=True)
    pool.remove("b")
    pool.remove("c")
    assert pool.failed == {}

    assert {*pool.names} == {"a", "d"}
    with pytest.raises(LorakitError, match="not loaded"):
        pool.remove("b")


def test_an_adapter_that_was_unloaded_before_its_turn_is_404(
    empty: AdaptedModel, pool: AdapterPool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = pool.adapter

    def unload_first(name: str | None) -> Any:  # as another client may, between the look at the name and its use
        if name == "c":
            pool.remove(name)
        return adapter(name)

    monkeypatch.setattr(pool, "adapter", unload_first)
    body = {"model": "c", "prompt": "hi", "max_tokens": 2}
    reply = patient.post(f"{address}/v1/completions", json=body)

    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert patient.post(f"{address}/v1/completions", json=body | {"model": "d"}).status_code == 200


def test_what_was_allowed_once_is_allowed_when_it_is_read_again(
    empty: AdaptedModel, copies: dict[str, Path], tmp_path: Path
) -> None:
    foreign = without_facts(copies["a"], tmp_path / "foreign", lambda facts: facts["base"].update(config="another"))
    pool = AdapterPool(empty, max_resident=1)
    with pytest.raises(PatchError, match="trained on another base .* pass --allow base"):
        pool.load("a", foreign)
    pool.load("a", foreign, allow={"base"})
    pool.load("b", copies["b"])
    assert resident(pool) == {"b"}
    assert pool.adapter("a") is not None
    assert resident(pool) == {"a"}


@pytest.fixture
def address(empty: AdaptedModel, pool: AdapterPool) -> Iterator[str]:
    engine = ServingEngine(empty, max_rows=4)
    with serving(OpenAIServer(empty, engine, "tiny", pool=pool).app) as opened:
        yield opened
    engine.close()


def test_a_damaged_adapter_is_the_servers_fault_and_listed(
    pool: AdapterPool, copies: dict[str, Path], address: str
) -> None:
    (copies["a"] / "adapter_model.safetensors").unlink()

    reply = patient.post(f"{address}/v1/completions", json={"model": "a", "prompt": "hi", "max_tokens": 1})

    facts = {one["name"]: one["error"] for one in patient.get(f"{address}/v1/adapters").json()["data"]}
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
    assert facts["a"] in reply.json()["error"]["message"]
    assert "no such file" in facts["a"]
    assert facts["b"] is None
    pool.load("a", copies["b"], replace=True)
    assert pool.failed == {}


def test_requests_for_all_adapters_at_once_are_answered_as_python_answers_them(
    address: str, pool: AdapterPool, base: Path, copies: dict[str, Path]
) -> None:
    everything: AdaptedModel = lorakit.load(base, copies, dtype="float32")
    answers: dict[tuple[str, int], Any] = {}

    def ask(name: str, number: int) -> None:
        body = {"model": name, "messages": [{"role": "user", "content": f"say {number}"}], "max_tokens": 6,
                "temperature": 0}  # fmt: skip
        answers[name, number] = patient.post(f"{address}/v1/chat/completions", json=body).json()

    threads = [threading.Thread(target=ask, args=(name, number)) for number in range(4) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for (name, number), reply in answers.items():
        expected = everything.generate([[{"role": "user", "content": f"say {number}"}]], name, max_new_tokens=6)[0]
        assert reply["choices"][0]["message"]["content"] == expected, reply
    states = [adapter["state"] for adapter in patient.get(f"{address}/v1/adapters").json()["data"]]
    assert sorted(states) == ["loaded", "loaded", "on disk", "on disk"]
    assert len(patient.get(f"{address}/v1/models").json()["data"]) == 5
