"""Of a folder that `datasets` saved one split is read, and files that their names hold out are not trained on."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from lorakit.cli import main
from lorakit.data.find_rows import check_training_files, find_sources
from lorakit.data.load import check_sources
from lorakit.data.rows import read_rows
from lorakit.errors import DataError
from lorakit.recipe import load_recipe
from tests.helpers.rows import chat, write_rows


def rows_of(path: Path, split: str = "train") -> list[Any]:
    return [row["text"] for source in find_sources(str(path), split) for _, row in read_rows(source)]


def texts(*names: str) -> Any:
    return datasets.Dataset.from_list([{"text": name} for name in names])


def write_recipe(folder: Path, train: str, **data: str) -> Path:
    others = "".join(f"  {key}: {value}\n" for key, value in data.items())
    path = folder / "recipe.yaml"
    path.write_text(f"base: {{model: builtin:tiny}}\ndata:\n  train: {train}\n{others}output: {folder / 'out'}\n")
    return path


def test_a_saved_dataset_dict_is_read_by_its_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    datasets.DatasetDict({"train": texts("a", "b"), "test": texts("c"), "more": texts("d")}).save_to_disk(folder)
    assert rows_of(folder) == ["a", "b"]
    assert rows_of(folder, "test") == ["c"]
    assert rows_of(tmp_path) == ["a", "b"]  # the folder above it
    assert rows_of(folder / "test") == ["c"]  # the user names it
    with pytest.raises(
        DataError, match="without the split 'dev'; its splits are train, test, more; name one in data.hub_split"
    ):
        rows_of(folder, "dev")
    recipe = write_recipe(tmp_path, str(folder), eval=str(folder), hub_eval_split="more")
    check_sources(load_recipe(recipe))
    assert main(["check", str(recipe)]) == 0
    read = f"read of a DatasetDict: {folder / 'train'}, {folder / 'more'} (data.hub_split and data.hub_eval_split name"
    assert read in capsys.readouterr().out


def test_a_saved_dataset_is_read_without_the_librarys_cache(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    texts("a", "b", "c").save_to_disk(folder, num_shards=2)
    datasets.load_from_disk(folder).map(lambda row: {"text": row["text"] * 2}, load_from_cache_file=True)
    assert len(list(folder.glob("*.arrow"))) == 3
    assert rows_of(folder) == ["a", "b", "c"]
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="state.json names the file data-00001-of-00002.arrow, which is not there"):
        rows_of(folder)


@pytest.mark.parametrize(
    ("files", "name", "held"),
    [
        (["train.jsonl", "eval.jsonl"], "", "eval.jsonl"),
        (["a/rows.jsonl", "dev/rows.jsonl"], "", "dev/rows.jsonl"),
        (["a.jsonl", "a_test.jsonl"], "/*.jsonl", "a_test.jsonl"),
        (["train-00000.jsonl", "validation-00000.jsonl"], "/**/*.jsonl", "validation-00000.jsonl"),
        (["train.jsonl", "latest.jsonl", "devices.jsonl", "train_dev.jsonl"], "", None),
        (["x/test.jsonl", "y/test.jsonl"], "/*/test.jsonl", None),  # what the user wrote
        (["test.jsonl"], "", None),
    ],
)
def test_files_held_out_by_their_names_are_not_trained_on_beside_others(
    tmp_path: Path, files: list[str], name: str, held: str | None
) -> None:
    folder = tmp_path / "test set"  # the name of the folder itself is what the user wrote
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / file, [{"text": "a"}])
    if held is None:
        check_training_files(f"{folder}{name}", "train")
        return
    with pytest.raises(DataError) as caught:
        check_training_files(f"{folder}{name}", "train")
    assert f"held-out rows: {folder / held}; they would be trained on beside {folder / files[0]}" in str(caught.value)
    check_training_files(tuple(str(folder / file) for file in files), "train")
    check_training_files(f"{folder}{name}", "train", [(folder / held).resolve()])


def test_check_train_and_init_refuse_a_folder_with_held_out_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train", "eval"):
        write_rows(folder / f"{name}.jsonl", [chat(name, "yes")] * 3)
    for command in (
        ["check", str(write_recipe(tmp_path, str(folder)))],
        ["train", str(tmp_path / "recipe.yaml"), "data.eval=0.3"],
        ["init", "--base", "builtin:tiny", "--data", str(folder), "--out", str(tmp_path / "new.yaml")],
    ):
        assert main(command) == 2
        assert f"names say that these are held-out rows: {folder / 'eval.jsonl'}" in capsys.readouterr().err
    assert (
        main(["check", str(tmp_path / "recipe.yaml"), f"data.eval={folder / 'eval.jsonl'}", "data.on_shared_rows=drop"])
        == 0
    )
    assert main(["check", str(tmp_path / "recipe.yaml"), f"data.train={folder / 'train.jsonl'}"]) == 0
