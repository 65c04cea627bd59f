"""lm-eval measures over HTTP what Python computes with the same base and adapter."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lorakit
from conformance.server import API_KEY, BASE, CHAT, ROOT, TEXT, Server
from lorakit.inference.adapted_model import AdaptedModel

FOLDER = Path(__file__).parent / "lm_eval"
ROWS = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]
TOKENIZER = ROOT / "lorakit" / "assets" / "tiny"
MODELS = [BASE, "json"]


@pytest.fixture(scope="module")
def model() -> AdaptedModel:
    torch.set_num_threads(1)
    return lorakit.load("builtin:tiny", {"json": ROOT / "adapters" / "json"}, dtype="float32")


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let lm-eval find rows by the path in its tasks, and nothing on a hub."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    yield
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def evaluate(
    server: Server, kind: str, path: str, task: str, name: str, *, template: bool = True, **settings: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Return lm-eval's scores of a task, and its samples in the order of the rows."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    arguments = {"model": name, "base_url": f"{server.address}{path}", "max_length": 1024, "max_retries": 1}
    if kind == "local-completions":
        arguments |= {"tokenizer": str(TOKENIZER), "tokenizer_backend": "huggingface"}
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments | settings, tasks=[task], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        apply_chat_template=template, batch_size=1 if kind.startswith("local-chat") else 4,
    )  # fmt: skip
    return found["results"][task], sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))


def logprob(model: AdaptedModel, name: str, ids: list[int], number: int) -> tuple[float, bool]:
    """Return the log-probability of the last ``number`` tokens, and True if each is the most probable one."""
    logits = (
        model(torch.tensor([ids]), adapters=None if name == BASE else name).logits[0, -number - 1 : -1].log_softmax(-1)
    )
    last = torch.tensor(ids[-number:])
    return float(logits[torch.arange(number), last].sum()), bool((logits.argmax(-1) == last).all())


def ids_of(model: AdaptedModel, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    # lm-eval applies no chat template where it sends texts
    [{}, {"num_concurrent": 3}, {"tokenized_requests": False, "template": False}],
    ids=["ids", "concurrent", "texts"],
)
def test_log_probabilities_of_answers_are_pythons(
    server: Server, model: AdaptedModel, name: str, settings: dict[str, Any]
) -> None:
    scores, samples = evaluate(server, "local-completions", TEXT, "lorakit_answers", name, **settings)

    right = 0
    for row, sample in zip(ROWS, samples, strict=True):
        prompt = row["question"]
        if settings.get("template", True):
            messages = [{"role": "user", "content": prompt}]
            prompt = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pairs = [(ids_of(model, prompt), ids_of(model, prompt + answer)) for answer in row["answers"]]
        expected = [logprob(model, name, ids, len(ids) - len(context)) for context, ids in pairs]
        measured = [response[0] for response in sample["resps"]]
        assert [value for value, _ in measured] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in measured] == [greedy for _, greedy in expected]
        values = [value for value, _ in expected]
        right += values.index(max(values)) == row["right"]
    assert scores["acc,none"] == right / len(ROWS)
    assert 0 < right < len(ROWS)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_texts_are_pythons(server: Server, model: AdaptedModel, name: str) -> None:
    _, samples = evaluate(server, "local-completions", TEXT, "lorakit_rolling", name, template=False)
    for row, sample in zip(ROWS, samples, strict=True):
        ids = ids_of(model, row["question"])
        (measured,) = sample["resps"][0]
        assert measured == pytest.approx(
            logprob(model, name, [model.tokenizer.bos_token_id, *ids], len(ids))[0], abs=1e-3
        )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "path"), [("local-chat-completions", CHAT), ("local-completions", TEXT)])
def test_generated_answers_are_pythons(server: Server, model: AdaptedModel, name: str, kind: str, path: str) -> None:
    scores, samples = evaluate(server, kind, path, "lorakit_words", name)

    questions = [[{"role": "user", "content": row["question"]}] for row in ROWS]
    expected = model.generate(questions, None if name == BASE else name, max_new_tokens=64)
    assert [sample["resps"][0][0] for sample in samples] == expected
    exact = sum(text == row["answers"][row["right"]] for text, row in zip(expected, ROWS, strict=True))
    assert scores["exact_match,none"] == exact / len(ROWS)
    assert 0 < exact < len(ROWS)
