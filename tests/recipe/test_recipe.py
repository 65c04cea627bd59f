"""Given this YAML, exactly this error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lorakit.errors import RecipeError
from lorakit.recipe import ParallelSection, load_recipe
from lorakit.recipe.schema import schema_text

ROOT = Path(__file__).parents[2]
GOOD = "base: {model: builtin:tiny}\ndata: {train: rows.jsonl}\noutput: out\n"


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).replace(str(path), "r.yaml").splitlines()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter:\n  rnak: 8\n" + GOOD, "r.yaml:2: adapter.rnak: unknown key. Nearest: 'rank'."),
        ("steps: 3\n" + GOOD, "r.yaml:1: steps: unknown key. Nearest: 'train.steps'."),
        ("rank: 3\n" + GOOD, "r.yaml:1: rank: unknown key. Nearest: 'adapter.rank'."),
        ("lr: 3\n" + GOOD, "r.yaml:1: lr: unknown key. Nearest: 'train.learning_rate'."),
        ("train: {lr: 3}\n" + GOOD, "r.yaml:1: train.lr: unknown key. Nearest: 'learning_rate'."),
        (
            "adapter: {init: {{ x }}}\n" + GOOD,
            "r.yaml:1: a key must be text, got a list or a mapping; put it in quotes, and a text that begins with { or [ too",
        ),
        ("val_set_size: 0.1\n" + GOOD, "r.yaml:1: val_set_size: unknown key. Nearest: 'data.eval'."),
        (
            "parallel: {context_parallel_size: 2}\n" + GOOD,
            "r.yaml:1: parallel.context_parallel_size: unknown key. Nearest: 'sequence'.",
        ),
        ("adapter:\n  rank: true\n" + GOOD, "r.yaml:2: adapter.rank: Input should be a valid integer, got True"),
        ("adapter:\n  rank: yes\n" + GOOD, "r.yaml:2: adapter.rank: Input should be a valid integer, got 'yes'"),
        ("adapter:\n  rank: 010\n" + GOOD, "r.yaml:2: adapter.rank: Input should be a valid integer, got '010'"),
        ("train: {steps: 2:30}\n" + GOOD, "r.yaml:1: train.steps: Input should be a valid integer, got '2:30'"),
        ("1: 4\n" + GOOD, "r.yaml:1: a key must be text, got '1'; put it in quotes"),
        ("? [a]\n: 1\n", "r.yaml:1: a key must be text"),
        (f"train: {{seed: {'9' * 5000}}}\n" + GOOD, "r.yaml:1: train.seed: Input should be"),
        (GOOD.replace("out\n", '" "\n'), "r.yaml:3: output: blank, or with characters that no name has"),
        ('adapter: {rank: "8"}\n' + GOOD, "r.yaml:1: adapter.rank: Input should be a valid integer, got '8'"),
        ("adapter: {rank: 0}\n" + GOOD, "r.yaml:1: adapter.rank: Input should be greater than or equal to 1, got 0"),
        (
            "train: {learning_rate: .nan}\n" + GOOD,
            "r.yaml:1: train.learning_rate: Input should be a finite number, got nan",
        ),
        (
            "adapter: {method: dorra}\n" + GOOD,
            "r.yaml:1: adapter.method: Input should be 'lora', 'rslora', 'lora_fa', 'dora' or 'rsdora', got 'dorra'. Nearest: 'dora', 'rsdora', 'lora'.",
        ),
        (
            "adapter:\n  targets: [q_proj, 3]\n" + GOOD,
            "r.yaml:2: adapter.targets.1: Input should be a valid string, got 3",
        ),
        ("train: {epochs: 1, steps: 3}\n" + GOOD, "r.yaml:1: train: give `epochs` or `steps`, not both"),
        ("train: {select: best}\n" + GOOD, "r.yaml:1: train.select needs held-out rows: set data.eval"),
        (GOOD.replace("output: out\n", ""), "r.yaml:1: output: this key is required"),
        (GOOD + "output: again\n", "r.yaml:4: key 'output' appears twice, first on line 3"),
        ("a: &x 1\nb: *x\n", "r.yaml:1: aliases and anchors are not allowed"),
        ("base: !!python/name:os.system\n", "r.yaml:1: tag tag:yaml.org,2002:python/name:os.system is not allowed"),
        ("- 1\n", "r.yaml:1: a recipe is a mapping of sections, got list"),
        ("adapter: {targets: 'q_(proj'}\n" + GOOD, "r.yaml:1: adapter.targets: not a regular expression:"),
        ("base: 2026-01-01\n", "r.yaml:1: base: Input should be an object, got '2026-01-01'"),
        ("[" * 5000 + "]" * 5000, "r.yaml: nested too deeply"),
    ],
)
def test_each_mistake_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(tmp_path, text)), problems(tmp_path, text)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    lines = problems(tmp_path, "adapter: {rank: 0, alhpa: 1}\ntrain: {stpes: 3}\n")

    assert len(lines) == 6  # three mistakes and the three missing keys: base, data, output


def test_a_text_that_is_refused_is_one_mistake_although_a_list_may_be_there_too(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD, "data.train=~/x") == [
        "override 'data.train=~/x': data.train: write the folder out: ~ is not expanded, got '~/x'"
    ]
    assert "train.log_to: Input should be a valid array" in problems(tmp_path, GOOD, "train.log_to=wandb")[0]


def test_an_override_may_be_a_pattern_and_one_that_is_no_yaml_says_how_to_quote_it(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    assert load_recipe(tmp_path / "r.yaml", ("data.train=*.jsonl",)).data.train == "*.jsonl"
    assert problems(tmp_path, GOOD, "data.train=%a")[0].endswith("goes in quotes: 'data.train=\"%a\"'")


def test_a_recipe_that_is_no_path_is_an_error_of_one_line() -> None:
    with pytest.raises(RecipeError, match="recipe: the path of a YAML file, got a dict"):
        load_recipe({"a": 1})  # type: ignore[arg-type]


def test_an_override_is_named_as_the_source_of_its_mistake(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD, "train.seed=-1")[0].startswith("override 'train.seed=-1': train.seed: ")
    assert problems(tmp_path, GOOD, "train.seed")[0].startswith("override 'train.seed': write it as key.path=value")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("train.warmup_steps=500", "train.steps=100"),
            "r.yaml:1 with override 'train.warmup_steps=500' and 'train.steps=100': train: warmup_steps: 500 of 100",
        ),
        (("train.seed=7", "train.select=best"), "r.yaml:1 with override 'train.select=best': train.select needs"),
        (("evaluation.num_rows=3",), "r.yaml:1 with override 'evaluation.num_rows=3': evaluation: nothing is"),
    ],
)
def test_overrides_that_contradict_other_keys_are_named_beside_the_file(
    tmp_path: Path, overrides: tuple[str, ...], expected: str
) -> None:
    (line,) = problems(tmp_path, GOOD, *overrides)
    assert line.startswith(expected)


def test_overrides_and_plain_exponents_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD + "train: {learning_rate: 1e-4}\n")

    recipe = load_recipe(tmp_path / "r.yaml", ("train.steps=7", "adapter.targets=[q_proj, v_proj]"))

    assert recipe.train.learning_rate == 0.0001
    assert recipe.train.steps == 7
    assert recipe.adapter.targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("in_file", "override", "left"),
    [
        ("epochs: 2", "train.steps=40", {"epochs": None, "steps": 40}),
        ("steps: 9", "train.epochs=0.5", {"epochs": 0.5, "steps": None}),
        ("epochs: 2", "train.steps=null", {"epochs": 2, "steps": None}),
        ("warmup_steps: 9", "train.warmup_ratio=0.1", {"warmup_steps": None, "warmup_ratio": 0.1}),
    ],
)
def test_an_override_replaces_the_files_alternative_to_it(
    tmp_path: Path, in_file: str, override: str, left: dict[str, float | None]
) -> None:
    (tmp_path / "r.yaml").write_text(GOOD + f"train: {{{in_file}}}\n")

    train = load_recipe(tmp_path / "r.yaml", (override,)).train

    assert {key: getattr(train, key) for key in left} == left


def test_two_overrides_that_are_alternatives_are_an_error(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, GOOD, "train.steps=40", "train.epochs=1")
    assert "give `epochs` or `steps`, not both" in line


def test_an_empty_section_can_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD + "train:\nobjective:\nevaluation:\n")

    assert load_recipe(tmp_path / "r.yaml", ("train.steps=5",)).train.steps == 5


def test_files_that_are_no_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"looked for {tmp_path}/absent.yaml"):
        load_recipe(tmp_path / "absent.yaml")
    assert "bytes; a recipe has at most" in problems(tmp_path, "#" * 10_000_000)[0]
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid_and_names_the_schema(path: Path) -> None:
    load_recipe(path)

    assert path.read_text().startswith("# yaml-language-server: $schema=../docs/recipe.schema.json\n")


def test_the_written_schema_is_the_current_one() -> None:
    assert (ROOT / "docs" / "recipe.schema.json").read_text() == schema_text()
    assert (
        "the inner width" in json.loads(schema_text())["$defs"]["AdapterSection"]["properties"]["rank"]["description"]
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "absent.yaml"], ["check", "absent.yaml"]]
)
def test_help_and_recipe_errors_answer_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom lorakit.cli import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as stop: code = stop.code\n"
        "print(code, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)

    expected = "0" if "--help" in arguments else "2"
    assert done.stdout.splitlines()[-1] == f"{expected} []"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "zero3", "processes": 2}, r"pipeline: 2 goes with ddp or fsdp2, got backend `zero3` \(DeepSpeed"),
        ({"backend": "single"}, "pipeline: 2 goes with ddp or fsdp2, got backend `single`"),
        ({"backend": "ddp", "processes": 3}, "pipeline: 2 does not divide the 3 processes"),
        (
            {"backend": "ddp", "processes": 6, "sequence": 2},
            "pipeline: 2 x sequence: 2 does not divide the 6 processes",
        ),
        ({"backend": "fsdp2", "processes": 6, "tensor": 2}, "pipeline: 2 x tensor: 2 does not divide the 6 processes"),
    ],
)
def test_stages_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSection(pipeline=2, **settings)


def test_auto_processes_are_those_that_the_launcher_started(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + "parallel: {backend: ddp, processes: auto}\n")

    parallel = load_recipe(path, launched=lambda: {"processes": 6, "nodes": 3}).parallel

    assert (parallel.processes, parallel.nodes) == (6, 3)
    assert load_recipe(path, ("parallel.processes=2",)).parallel.processes == 2
    with pytest.raises(
        RecipeError, match="no launcher, such as torchrun, started this one; name a number, as in parallel.processes=8"
    ):
        load_recipe(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "zero3", "processes": 2}, r"tensor: 2 goes with ddp or fsdp2, got backend `zero3` \(DeepSpeed"),
        ({"backend": "single"}, "tensor: 2 goes with ddp or fsdp2, got backend `single`"),
        ({"backend": "ddp", "processes": 3}, "tensor: 2 does not divide the 3 processes of a machine"),
        ({"backend": "ddp", "processes": 6, "sequence": 2}, "sequence: 2 x tensor: 2 does not divide the 6 processes"),
    ],
)
def test_processes_that_cannot_share_weights_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSection(tensor=2, **settings)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "adamw8bit"])
def test_shared_weights_do_not_go_with_what_reads_them_in_full(tmp_path: Path, optimizer: str) -> None:
    parallel = ("parallel.backend=ddp", "parallel.processes=2", "parallel.tensor=2")
    (problem,) = problems(tmp_path, GOOD, *parallel, f"train.optimizer={optimizer}")
    assert f"parallel.tensor: 2 does not go with train.optimizer: {optimizer}, which updates full tensors" in problem


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "single"}, "sequence: 2 goes with ddp, zero1, zero2, fsdp2 or zero3, got backend `single`"),
        (
            {"backend": "auto", "processes": 2},
            "sequence: 2 goes with ddp, zero1, zero2, fsdp2 or zero3, got backend `auto`",
        ),
        ({"backend": "ddp", "processes": 3}, "sequence: 2 does not divide the 3 processes of a machine"),
        ({"backend": "ddp", "processes": 6, "nodes": 2}, "sequence: 2 does not divide the 3 processes of a machine"),
    ],
)
def test_processes_that_cannot_share_tokens_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSection(sequence=2, **settings)
