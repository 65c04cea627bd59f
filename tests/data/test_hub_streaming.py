"""A data set of the hub that is streamed while the hub or its files fail. By `datasets`, and a small hub."""

import gzip
import io
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorakit.data.dataset import TokenDataset
from lorakit.data.find_rows import find_sources
from lorakit.data.row_settings import RowSettings
from lorakit.data.rows import read_rows
from lorakit.data.token_cache import no_progress, tokenize_sources
from lorakit.errors import DataError, HubError, LorakitError, TemporaryFailure
from lorakit.files.atomic import cache_folder
from tests.helpers.hub import Hub, Repository, serving_hub

SETTINGS = RowSettings(64, "stop", "stop", "answer", limit=510)
FILE_ROWS = 300


def rows(start: int) -> list[dict[str, str]]:
    return [{"prompt": f"say {i}", "completion": "so " * (1 + i % 3)} for i in range(start, start + FILE_ROWS)]


def lines(start: int) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows(start))


def table(start: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows(start)), file, row_group_size=100)
    return file.getvalue()


FORMS: dict[str, Callable[[int], bytes]] = {
    "jsonl": lines, "jsonl.gz": lambda start: gzip.compress(lines(start)), "parquet": table,
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of this test's own, to which `datasets` is pointed as by HF_ENDPOINT and HF_HOME; no retry waits."""
    with serving_hub() as hub:
        constants, template = huggingface_hub.constants, "{repo_id}/resolve/{revision}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.address}/{template}/{{filename}}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", f"{hub.address}/datasets/{template}/{{path}}")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "stored")
        monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 2)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.delenv("HF_ENDPOINT", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield hub


def add_set(hub: Hub, form: str = "jsonl") -> str:
    """Add a data set of three files; return the start of the request for the second one."""
    hub.repositories["org/set"] = Repository()
    files = {f"train-{number}.{form}": FORMS[form](FILE_ROWS * number) for number in range(3)}
    commit = hub.repositories["org/set"].commit("rows", files)
    return f"GET /datasets/org/set/resolve/{commit}/train-1.{form}"


def tokens(rows: TokenDataset) -> list[list[int]]:
    return [rows.ids(row).tolist() for row in range(len(rows))]


def streamed(tokenizer: Any, progress: Any = no_progress) -> list[list[int]]:
    sources = find_sources("org/set", "train", streaming=True)
    return tokens(tokenize_sources(sources, tokenizer, SETTINGS, progress))


@pytest.fixture
def expected(tmp_path: Path, tokenizer: Any) -> list[list[int]]:
    """The tokens of the first rows, read from files."""
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(lines(FILE_ROWS * number))
    return tokens(tokenize_sources(find_sources(tuple(map(str, paths)), "train"), tokenizer, SETTINGS))


FAULTS: dict[str, tuple[Callable[[Hub, str], None], type[LorakitError], str]] = {
    "status 500": (lambda hub, file: hub.refuse.update({file: 500}), TemporaryFailure,
                   r"org/set: after row 300: the hub could not answer \(500\); the same command tries again"),
    "status 403": (lambda hub, file: hub.refuse.update({file: 403}), HubError,
                   r"org/set: after row 300: the hub says that your token may not read it \(403\): refused"),
    "cut inside": (lambda hub, file: hub.cut_after.update({file: 900}), TemporaryFailure,
                   "org/set: after row 300: the hub was not reached, or the connection broke: .*; the same command"),
    "cut before": (lambda hub, file: setattr(hub, "cut", file), TemporaryFailure,
                   "org/set: after row 300: .*the connection broke: Server disconnected"),
    "at the start": (lambda hub, file: setattr(hub, "cut", "HEAD"), TemporaryFailure,
                     "org/set: .*the connection broke: Server disconnected.*; the same command tries again"),
    "start refused": (lambda hub, file: hub.refuse.update({"HEAD": 500}), TemporaryFailure,
                      r"org/set: the hub could not answer \(500\); the same command tries again"),
}  # fmt: skip
ONCE = ("status 500", "cut inside", "at the start")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the client, whose connection was cut
@pytest.mark.parametrize(
    "fault", [fault if fault in ONCE else pytest.param(fault, marks=pytest.mark.matrix) for fault in FAULTS]
)
def test_a_hub_that_fails_is_named_with_the_row_and_the_next_call_is_right(
    fault: str, hub: Hub, tokenizer: Any, expected: list[list[int]]
) -> None:
    file = add_set(hub)
    fail, error, said = FAULTS[fault]
    fail(hub, file)
    with pytest.raises(error, match=said) as caught:
        streamed(tokenizer)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert len(list(cache_folder("tokens").glob("*"))) == 1  # the expected rows, and nothing of the stream

    hub.refuse, hub.cut, hub.cut_after = {}, None, {}
    assert streamed(tokenizer) == expected


def cut_end(content: bytes) -> bytes:
    return content[:-60]


def spoil(content: bytes) -> bytes:
    return content[:150] + bytes(300) + content[450:]


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("jsonl", cut_end),
        pytest.param("jsonl.gz", cut_end, marks=pytest.mark.matrix),
        pytest.param("parquet", cut_end, marks=pytest.mark.matrix),
        ("parquet", spoil),
    ],
)
def test_a_damaged_file_is_no_matter_of_the_connection(
    form: str, damage: Callable[[bytes], bytes], hub: Hub, tokenizer: Any, expected: list[list[int]]
) -> None:
    add_set(hub, form)
    repository, name = hub.repositories["org/set"], f"train-1.{form}"
    sound = repository.commits[-1][2][name]
    repository.commit("damaged", {name: damage(sound)})
    with pytest.raises(DataError, match=r"org/set: cannot be read after row 300: .*; fix the .*`limit: 300`"):
        streamed(tokenizer)

    repository.commit("mended", {name: sound})
    assert streamed(tokenizer) == expected


def test_a_data_set_that_is_stored_is_known_by_its_commit(hub: Hub) -> None:
    add_set(hub)
    (source,) = find_sources("org/set", "train")
    first = source.version()
    assert [row["prompt"] for _, row in read_rows(source)] == [f"say {number}" for number in range(3 * FILE_ROWS)]
    assert source.version() == first

    hub.repositories["org/set"].commit("more", {"train-3.jsonl": lines(3 * FILE_ROWS)})
    assert source.version() != first
    assert sum(1 for _ in read_rows(source)) == 4 * FILE_ROWS


def test_a_second_call_waits_says_so_and_goes_on_when_the_first_is_killed(
    hub: Hub, tokenizer: Any, expected: list[list[int]]
) -> None:
    held, second_file = threading.Event(), add_set(hub)
    hub.wait = {second_file: held}
    context = multiprocessing.get_context("fork")

    def start() -> tuple[Any, Any]:
        reading, writing = context.Pipe(duplex=False)

        def tokenize() -> None:
            os.setsid()
            writing.send(streamed(tokenizer, lambda done, total: done is None and writing.send("waits")))

        process = context.Process(target=tokenize)
        process.start()
        return process, reading

    def reached(number: int) -> None:
        for _ in range(6_000):
            if sum(line.startswith(second_file) for line in list(hub.requests)) >= number:
                return
            threading.Event().wait(0.01)
        raise TimeoutError(second_file)

    first, _ = start()
    reached(1)
    second, said = start()
    assert said.poll(60)
    assert said.recv() == "waits"
    os.kill(first.pid, 9)
    reached(2)
    held.set()

    assert said.poll(60)
    assert said.recv() == expected
    second.join()
