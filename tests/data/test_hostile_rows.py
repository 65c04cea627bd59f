"""Rows and files that were made to take all memory or time: refused before the work, by counts."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_skeleton, named_classes
from lorakit.data.encode_chunks import CHUNK_ROWS, _read_chunks
from lorakit.data.find_rows import find_sources
from lorakit.data.row_files import MAX_BLANK_LINES, LongRow, read_file
from lorakit.data.row_settings import RowSettings
from lorakit.data.token_cache import tokenize_sources
from lorakit.errors import DataError, LorakitError
from lorakit.patch.prompting import read_chat_template
from lorakit.recipe.load import load_recipe

TINY = Path(__file__).parents[2] / "lorakit" / "assets" / "tiny"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes "}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_bytes(b"a" * 1_000_001)]
)
def test_a_chat_template_is_a_regular_file_of_a_megabyte_at_most(tmp_path, make):
    path = tmp_path / "a.jinja"
    make(path)
    with pytest.raises(DataError, match=r"data.chat_template: .*a.jinja: not a regular file of up to 1,000,000 bytes"):
        read_chat_template(str(path))


class Counting:
    """A tokenizer that counts the letters that it is given."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_letters = 0

    def __call__(self, text, **kwargs):
        self.num_letters += len(text)
        return self._tokenizer(text, **kwargs)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def bad_row(path: Path, tokenizer, **settings) -> str:
    counting = Counting(tokenizer)
    with pytest.raises(DataError) as caught:
        tokenize_sources(find_sources(str(path), "train"), counting, RowSettings(**settings))
    assert counting.num_letters < 1000
    return str(caught.value)


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_row_of_megabytes_is_refused_before_it_is_tokenised(tmp_path, tokenizer, form):
    path = tmp_path / f"a.{form}"
    text = "a b " * 300_000
    path.write_text(json.dumps({"text": text}) + "\n" if form == "jsonl" else f"prompt,completion\na,{text}\n")
    message = bad_row(path, tokenizer)
    assert f"{path}:{1 if form == 'jsonl' else 2}: has 1,200,0" in message
    assert "bytes, and 1,000,000 are read; cut it" in message


def test_longer_rows_of_more_tokens_and_books_that_are_split_are_read():
    assert RowSettings(max_tokens=131_072).max_bytes == 64 * 131_072
    assert RowSettings(on_long_rows="split").max_bytes == RowSettings(on_long_rows="fill").max_bytes == 8_000_000


def test_long_rows_are_dropped_and_counted_without_being_tokenised(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("hello there", "a " * 600_000)))
    counting = Counting(tokenizer)
    rows = tokenize_sources(find_sources(str(path), "train"), counting, RowSettings(on_long_rows="drop"))
    assert (len(rows), counting.num_letters < 1000) == (1, True)
    assert rows.parts[0].table.counts.dropped_long == 1


def test_a_conversation_of_thousands_of_turns_is_not_rendered(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES * 1500}) + "\n")
    assert "a.jsonl:1: has 3,000 messages, and 1,000 are read; cut it, or raise data.max_tokens" in bad_row(
        path, tokenizer
    )


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_blank_lines_are_not_read_without_end(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"prompt,completion\n" + b"\n" * (MAX_BLANK_LINES + 2)))
    with pytest.raises(DataError, match=rf"the last {MAX_BLANK_LINES + 1:,} lines are blank; remove them"):
        list(read_file(path))


def test_a_table_whose_rows_share_megabytes_goes_on_as_reasons(tmp_path):
    path = tmp_path / "a.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["x " * 600_000]))
    pq.write_table(pa.table({"text": text}), path)
    chunk = next(_read_chunks(find_sources(str(path), "train"), None, 1_000_000))
    assert [type(row) for _, _, row in chunk] == [LongRow] * CHUNK_ROWS


def test_columns_of_a_table_are_compared_in_one_pass(tmp_path):
    class Name(str):
        num_compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.num_compared += 1
            return str.__eq__(self, other)

    from lorakit.data.row_files import _refuse_repeated

    _refuse_repeated(tmp_path, [Name(f"c{number}") for number in range(1000)])
    assert Name.num_compared < 2000


def test_an_error_of_unknown_columns_names_forty(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    names = [f"c{number}" for number in range(1000)]
    path.write_text(f"{','.join(names)}\n{','.join(names)}\n")
    assert bad_row(path, tokenizer).count("c9") < 20


def test_a_weight_beyond_every_number_is_a_bad_row(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "weight": 1' + "0" * 400 + "}\n")
    assert "weight: a number from 0 to 1e+30 expected" in bad_row(path, tokenizer)


def test_a_base_with_a_pipe_among_its_files_is_refused_before_any_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(LorakitError, match=r"x.safetensors: not a regular file, and reading it may never end"):
        find_base(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "section"),
    [("steps", "train"), ("batch_size", "train"), ("keep_checkpoints", "train"), ("max_tokens", "data")],
)
def test_a_count_without_a_sane_end_is_refused(tmp_path, key, section):
    path = tmp_path / "recipe.yaml"
    sections = {"data": {"train": "a.jsonl"}, "train": {}}
    sections[section][key] = 10**30
    path.write_text(json.dumps({"base": {"model": "builtin:tiny"}, **sections, "output": "out"}))
    with pytest.raises(LorakitError, match=rf"{section}.{key}: Input should be less than or equal to 1000000000"):
        load_recipe(path)


def test_an_architecture_that_is_no_model_is_not_built(tmp_path):
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["PreTrainedModel"]}))
    assert type(load_skeleton(tmp_path, named_classes(tmp_path))).__name__ == config["architectures"][0]
