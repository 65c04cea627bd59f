"""The page at `/`, in a real browser: answers beside each other, adapters loaded and unloaded, nobody's HTML run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorakit
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.serving.app import OpenAIServer
from lorakit.serving.engine import ServingEngine
from tests.helpers import patient
from tests.helpers.chat_templates import trl_templates
from tests.helpers.chromium import COMMAND, Page, open_page
from tests.helpers.http_server import serving
from tests.helpers.patches import make_patch
from tests.helpers.serving import held_forwards, wait_until

pytestmark = pytest.mark.skipif(COMMAND is None, reason="no Chromium on this machine")
HOSTILE = "<img src=x onerror=window.hacked=1>"
READY = "document.querySelectorAll('#choices input').length == {}"
ANSWERED = (
    "document.querySelectorAll('.answer').length && document.getElementById('stop').disabled"
    " && [...document.querySelectorAll('.result')].every((facts) => /tokens, first after/.test(facts.textContent))"
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_page() as opened:
        yield opened


@pytest.fixture
def address(model: AdaptedModel, engine: ServingEngine, base: Path, tmp_path: Path) -> Iterator[str]:
    make_patch(base, tmp_path / "roots" / "one", seed=7)
    server = OpenAIServer(model, engine, "tiny", ["key"], "admin", tmp_path / "roots")
    with serving(server.app) as opened:
        yield opened
    for name in {*model.adapters} - {"a", "b"}:
        model.unload_adapter(name)


def opened(page: Page, address: str, *, width: int = 1280) -> None:
    page.open("about:blank")
    page.open(address, width)
    page.wait("document.getElementById('status')?.textContent.includes('key is required')")
    enter(page, "key", "key")
    page.wait(READY.format(3))


def enter(page: Page, field: str, text: str) -> None:
    page.evaluate(f"document.getElementById('{field}').focus(); document.getElementById('{field}').select()")
    page.type(text)
    page.evaluate("document.activeElement.blur()")


def test_one_prompt_is_answered_side_by_side_as_python_answers_it(
    page: Page, address: str, model: AdaptedModel
) -> None:
    opened(page, address)
    enter(page, "max_tokens", "12")
    enter(page, "prompt", "so many birds")
    page.evaluate("document.getElementById('prompt').focus()")
    page.press("Enter", modifiers=2)
    page.wait(ANSWERED)

    asked = [[{"role": "user", "content": "so many birds"}]]
    expected = {name or "tiny": model.generate(asked, name, max_new_tokens=12)[0] for name in (None, "a", "b")}
    answers = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.answer')].map("
        "(card) => [card.dataset.model, card.querySelector('pre:not(.thought)').textContent]))"
    )
    assert answers == expected
    assert page.evaluate("document.querySelector('#rows tr td:nth-child(5)').textContent") == "1"


def test_a_question_can_be_sent_as_an_address(page: Page, address: str) -> None:
    opened(page, f"{address}/#prompt=hello+there&models=a&max_tokens=5&temperature=0.5&seed=3")
    assert page.evaluate("[...document.querySelectorAll('#choices input:checked')].map((box) => box.value)") == ["a"]
    assert page.evaluate("document.getElementById('prompt').value") == "hello there"

    page.evaluate("document.getElementById('ask').requestSubmit()")
    page.wait(ANSWERED)

    assert page.evaluate("location.hash").split("&")[0] == "#prompt=hello+there"
    assert "key" not in page.evaluate("location.hash")


def test_adapters_are_loaded_and_unloaded_with_the_admin_key_alone(
    page: Page, address: str, model: AdaptedModel
) -> None:
    opened(page, address)
    enter(page, "lora_name", HOSTILE)
    enter(page, "lora_path", "one")
    load = "document.getElementById('load').requestSubmit()"
    page.evaluate(load)
    page.wait("document.getElementById('admin-status').textContent.includes('enter the admin key')")
    assert page.evaluate("document.activeElement.id") == "admin"
    assert HOSTILE not in model.adapters
    enter(page, "admin", "admin")
    page.evaluate(load)
    page.wait(READY.format(4))

    assert HOSTILE in model.adapters
    assert page.evaluate("document.querySelector('#rows').textContent").count(HOSTILE) == 1
    assert page.evaluate("window.hacked") is None

    unload = f"document.querySelector('[aria-label=\"Unload {HOSTILE}\"]').click()"
    page.evaluate("window.confirm = (text) => { window.question = text; return false; }")
    page.evaluate(unload)
    assert page.evaluate("window.question").startswith(f"Unload {HOSTILE}?")
    page.evaluate("window.confirm = () => true")
    assert HOSTILE in model.adapters
    page.evaluate(unload)
    page.wait(READY.format(3))
    assert HOSTILE not in model.adapters


def test_a_server_without_an_admin_key_says_how_adapters_are_loaded(
    page: Page, model: AdaptedModel, engine: ServingEngine
) -> None:
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        page.open(address)
        page.wait(READY.format(3))
        page.wait("document.getElementById('no-admin').offsetHeight")
        assert page.evaluate("document.getElementById('load').offsetHeight") == 0
        assert page.evaluate("document.querySelectorAll('#rows button').length") == 0
        page.evaluate("document.getElementById('prompt').value = 'hi'")
    page.evaluate("document.getElementById('ask').requestSubmit()")
    page.wait("document.querySelectorAll('.result.bad').length == 3")
    said = "[...new Set([...document.querySelectorAll('.result, #status')].map((place) => place.textContent))]"
    page.wait(f"{said}.length == 1")
    assert page.evaluate(said) == ["the connection failed; does the server still run?"]


def test_a_thought_is_shown_beside_its_answer(page: Page, base: Path) -> None:
    model = lorakit.load(base, dtype="float32", chat_template=trl_templates()["qwen3_5_think"])
    engine = ServingEngine(model)
    with serving(OpenAIServer(model, engine, "tiny").app) as address:
        page.open(address)
        page.wait(READY.format(1))
        enter(page, "max_tokens", "12")
        enter(page, "prompt", "so many birds")
        page.evaluate("document.getElementById('ask').requestSubmit()")
        page.wait(ANSWERED)
        ids = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": "so many birds"}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        thought = model.generate([ids], None, max_new_tokens=12)[0]
    engine.close()
    shown = page.evaluate("[...document.querySelectorAll('.answer pre')].map((place) => place.textContent)")
    assert "".join(shown).strip() == thought.strip()
    assert shown[0]


def test_an_answer_can_be_stopped(page: Page, address: str, model: AdaptedModel, engine: ServingEngine) -> None:
    opened(page, address)
    enter(page, "max_tokens", "200")
    enter(page, "prompt", "go on")
    with held_forwards(model):  # no answer ends by itself
        page.evaluate("document.getElementById('ask').requestSubmit()")
        page.press("Escape")
        page.wait("[...document.querySelectorAll('.result')].every((facts) => facts.textContent == 'stopped')")
    wait_until(lambda: engine.counts()["decoding"] == 0)
    assert page.evaluate("document.getElementById('stop').disabled")


def test_the_page_fits_a_phone_and_every_field_has_a_label(page: Page, address: str) -> None:
    opened(page, address, width=390)
    cells = "[...document.querySelectorAll('#rows td')].filter((cell) => cell.textContent)"
    page.evaluate(f"{cells}[0].textContent = 'x'.repeat(128)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = f"{cells}.map((cell) => cell.getBoundingClientRect())"
    assert page.evaluate(f"{boxes}.every((box) => box.width && box.left >= 0 && box.right <= 390)")
    shown = "(cell) => getComputedStyle(cell, '::before').content"
    assert page.evaluate(f"{cells}.slice(1, 6).map({shown})") == [
        f'"{name} "' for name in ("state", "rank", "size", "requests", "digest")
    ]
    assert (
        page.evaluate("[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length)") == []
    )


def test_a_short_answer_has_a_short_card(page: Page, address: str) -> None:
    opened(page, address)
    enter(page, "prompt", "hi")
    page.evaluate("document.getElementById('ask').requestSubmit()")
    page.wait(ANSWERED)
    page.evaluate("document.querySelector('.answer pre:not(.thought)').textContent = 'word '.repeat(500)")
    heights = page.evaluate("[...document.querySelectorAll('.answer')].map((card) => card.offsetHeight)")
    assert heights[0] > 2 * max(heights[1:])


def test_the_page_needs_no_other_host_and_can_run_no_other_script(address: str) -> None:
    texts = [patient.get(f"{address}{path}") for path in ("/", "/page.css", "/page.js")]
    assert [reply.status_code for reply in texts] == [200] * 3
    assert not any(scheme in reply.text for reply in texts for scheme in ("http:", "https:", "src=x"))
    assert "default-src 'none'; script-src 'self'" in texts[0].headers["content-security-policy"]
