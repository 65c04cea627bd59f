"""One page about a run: complete, safe to open, and readable."""

import json
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lorakit.cli import main
from lorakit.errors import RunError
from lorakit.files.text import size
from lorakit.inspection.html_report import write_report
from lorakit.run.charts import Chart, ChartLine, draw
from tests.helpers import chromium
from tests.helpers.runs import change_metrics, copy_run, interrupted_copy

HOSTILE = "</style></table><script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta"}


class Tags(HTMLParser):
    """The tags, attributes and texts of a page, which must be nested properly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_shows_figures_curves_settings_rows_memory_and_environment(finished_run: Path, tmp_path: Path) -> None:
    path = write_report(finished_run, tmp_path / "page.html")
    page = Tags(path.read_text())
    record = json.loads((finished_run / "run.json").read_text())
    peak = record["peak_memory_bytes"]  # of this process, which ran other tests before

    assert page.tags.count("svg") == 5  # loss, learning rate, gradient norm, tokens per second, accuracy
    for text in (
        "finished, step 6 of 6", "step 6, the last", "train.batch_size", "train.schedule", "cosine", "all-linear", f"{record['results']['eval_loss']:.4f}", "train.learning_rate", "0.01",
        record["data"]["train"]["digest"], "fused mlp", "2 of 2", "world_size", record["starts"][0]["host"],
        size(peak),
    ):  # fmt: skip
        assert any(text in part for part in page.texts), text
    assert any(f"torch {record['starts'][0]['versions']['torch']}" in part for part in page.texts)


def test_the_page_loads_nothing(finished_run: Path, tmp_path: Path) -> None:
    text = write_report(finished_run, tmp_path / "page.html").read_text()
    page = Tags(text)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "xlink:href")
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text


def hostile_copy(run: Path, copy: Path) -> Path:
    """Copy a run, with hostile text in every string of its record, in its keys, metrics and name."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(each) for key, each in value.items()}
        if isinstance(value, list):
            return [spoil(each) for each in value]
        return f"{value}{HOSTILE}" if isinstance(value, str) else value

    def change(record: dict[str, Any]) -> None:
        spoilt = spoil(record)
        for part, value in (("data", {HOSTILE: HOSTILE}), ("engine", HOSTILE), ("recipe", HOSTILE)):
            spoilt[part][HOSTILE] = value
        spoilt["fused"][HOSTILE] = spoilt["fused"]["mlp"]
        record |= spoilt | {HOSTILE: HOSTILE, "stopped_early": HOSTILE}

    copy_run(run, copy, change)
    answers = {"prompt": [{"role": HOSTILE, "content": HOSTILE}] * 2, "expected": HOSTILE, "predicted": HOSTILE * 99}
    samples = {"step": HOSTILE, "rows": [{"row": HOSTILE, **answers, "correct": False}, HOSTILE]}
    (copy / "samples.json").write_text(json.dumps(samples))
    change_metrics(copy, lambda line: line.update({HOSTILE: 1.0}))
    return copy


def test_hostile_text_of_a_run_is_text_on_its_page(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    path = write_report(hostile_copy(finished_run, folder / "b><i onclick=x>"))
    page = Tags(path.read_text())
    assert not {"script", "img", "b", "i"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert any(HOSTILE in text for text in page.texts)
    assert "Samples" in page.texts
    assert f"{HOSTILE}: {HOSTILE}\n{HOSTILE}: {HOSTILE}" in page.texts
    assert (HOSTILE * 99)[:600] + " ..." in page.texts
    assert ("aria-label", HOSTILE) in page.attributes


def test_samples_are_those_of_the_patchs_step_beside_the_bases_and_the_expected_answers(
    finished_run: Path, tmp_path: Path
) -> None:
    def sample(text: str) -> list[dict[str, Any]]:
        return [
            {"row": "a/b.jsonl:1", "prompt": "p", "expected": "right", "predicted": text, "correct": text == "right"}
        ]

    def best(record: dict[str, Any]) -> None:
        record["recipe"]["train"]["select"] = "best"
        record["best_step"] = 4

    folder = copy_run(finished_run, tmp_path / "best", best)
    samples = {"step": 6, "rows": sample("last"), "earlier": {"0": sample("base"), "4": sample("right")}}
    (folder / "samples.json").write_text(json.dumps(samples))
    page = write_report(folder).read_text()
    assert "step 4, best held-out loss" in page
    assert "at step 4 (train.eval_generate), that of the patch in this folder" in page
    assert "<td>p</td><td>base</td><td>right [exact]</td><td>right</td>" in re.sub(r"\s*\n\s*", "", page)

    del samples["earlier"]["4"]  # type: ignore[attr-defined]
    (folder / "samples.json").write_text(json.dumps(samples))
    page = write_report(folder).read_text()
    assert "at step 6 (train.eval_generate), not that of the patch in this folder" in page
    assert "<td>base</td><td>last</td><td>right</td>" in re.sub(r"\s*\n\s*", "", page)


def test_a_prompt_is_shown_with_its_tool_calls(finished_run: Path, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    prompt = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "dry", "name": None},
    ]
    folder = copy_run(finished_run, tmp_path / "calls", lambda record: None)
    row = {"row": "a.jsonl:1", "prompt": prompt, "expected": "Dry.", "predicted": "Wet.", "correct": False}
    (folder / "samples.json").write_text(json.dumps({"step": 6, "rows": [row]}))

    page = Tags(write_report(folder).read_text())

    said = json.dumps({"tool_calls": [call]}, sort_keys=True)
    assert f"user: How is it?\nassistant: {said}\ntool: dry" in page.texts


@pytest.mark.skipif(chromium.COMMAND is None, reason="needs Chromium")
def test_a_browser_shows_the_page_without_errors_in_both_colour_schemes(finished_run: Path, tmp_path: Path) -> None:
    path = write_report(hostile_copy(finished_run, tmp_path / "run"))
    with chromium.open_page() as page:
        page.open(path.as_uri(), width=360)
        page.wait("document.querySelectorAll('svg').length == 6")
        assert page.evaluate("document.title") == "run"
        assert page.evaluate("document.documentElement.scrollWidth <= 360")
        assert page.evaluate("[...document.querySelectorAll('svg')].every(each => each.clientHeight > 100)")
        colours = []
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert colours[0] != colours[1]
        assert page.errors == []


def test_an_interrupted_run_has_a_page_by_default_in_its_folder(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = interrupted_copy(finished_run, tmp_path / "half", 3)
    assert main(["report", str(half)]) == 0
    assert str(half / "report.html") in capsys.readouterr().out
    assert "interrupted, step 3 of 6" in (half / "report.html").read_text()
    (half / "metrics.jsonl").unlink()
    assert "No step is done yet" in write_report(half).read_text()


def test_what_is_no_run_or_no_file_is_refused(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run\.json"):
        write_report(tmp_path)
    with pytest.raises(RunError, match="is a folder; name a file in it"):
        write_report(finished_run, tmp_path)


def test_a_constant_learning_rate_is_drawn_at_its_value(finished_run: Path, tmp_path: Path) -> None:
    folder = copy_run(finished_run, tmp_path / "constant")
    change_metrics(folder, lambda line: line.update(learning_rate=0.002))
    page = write_report(folder).read_text()
    chart = next(part for part in page.split("<svg ") if 'aria-label="learning rate"' in part)
    labels = [float(text) for text in Tags(f"<svg {chart}".partition("</svg>")[0] + "</svg>").texts if is_number(text)]
    on_the_left = [label for label in labels if 0 < label < 0.5]  # the others are steps
    assert len(on_the_left) >= 3
    assert all(0.0018 < label < 0.0022 for label in on_the_left)


def is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False


@pytest.mark.parametrize(
    "points", [[(1, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -1.0), (2, 1e-9)], [(0, 1e30), (5, 1e-30)], [(3, 5.0), (4, 5.0)]]
)
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_of_any_values_is_drawn_as_tags_that_are_closed(points: list[tuple[int, float]], log: bool) -> None:
    image = BytesIO()
    draw([Chart("a <b> $x", [ChartLine("_$\\frac", points, marked=True)], log=log)], image, "svg")
    page = Tags(image.getvalue().decode().partition("standalone")[2].partition('dtd">')[2])
    assert "a <b> $x" in page.texts
    assert " _$\\frac" in page.texts


def test_a_long_line_keeps_its_peak_and_its_page_stays_small() -> None:
    values = Random(1)
    points = [(step, values.random()) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    image = BytesIO()
    draw([Chart("loss", [ChartLine("step", points)])], image, "svg")
    drawing = image.getvalue().decode()
    assert len(drawing) < 150_000
    curve = max(drawing.split(' d="'), key=len).partition('"')[0]
    heights = sorted(float(point.split()[2]) for point in curve.split("\n") if point.strip())
    assert heights[1] - heights[0] > 100  # the peak is far above all other points


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"recipe": {"train": {}}, "starts": 3, "engine": "x"}, {"step": 1, "loss": 1.0}),
        ({"recipe": {"train": {"select": "last"}}, "total_steps": "x"}, {"step": 1, "loss": "x"}),
        ({"recipe": {"train": [1]}, "data": 3}, {"step": "x"}),
    ],
)
def test_a_record_that_was_edited_is_refused_by_name(
    tmp_path: Path, record: dict[str, Any], line: dict[str, Any]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RunError, match=r"run\.json or metrics\.jsonl has a value that no run writes|is no step"):
        write_report(tmp_path)
