"""Score exact match on held-out rows: the base alone against an adapter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lorakit.data.row_formats import Chat, parse_row_format
from lorakit.data.rows import BadRow, find_sources, read_rows
from lorakit.errors import DataError, LorakitError, did_you_mean
from lorakit.inference.adapted_model import AdaptedModel

BATCH_ROWS = 50


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer."""

    prompt: list[dict[str, object]]
    answer: str


def score(
    model: AdaptedModel, data: Mapping[str, str], *, max_new_tokens: int, limit: int | None, say: Callable[[str], None]
) -> None:
    """Print, for each name in ``data``, the share of rows answered exactly by the base and by the adapter ``name``.

    Raises:
        DataError: a row without a final assistant message. LorakitError: no adapter of that name.
    """
    for name in data:
        if name not in model.adapters:
            loaded = ", ".join(model.adapters) or "none"
            raise LorakitError(
                f"--data {name}: no adapter of that name (loaded: {loaded}).{did_you_mean(name, model.adapters)}"
            )
    width = max(map(len, data))
    say(f"{'held-out exact match':<{width}}  {'rows':>5}  {'base':>6}  {'adapter':>7}")
    for name, path in data.items():
        questions = read_questions(path)[:limit]
        shares = [exact_match(model, questions, adapter, max_new_tokens) for adapter in (None, name)]
        say(f"{name:<{max(width, 20)}}  {len(questions):>5}  {shares[0]:>6.0%}  {shares[1]:>7.0%}")


def read_questions(path: str) -> list[Question]:
    """Read the rows of a file whose last message is the assistant's."""
    questions = []
    for source in find_sources(path, "test"):
        for line, row in read_rows(source):
            try:
                if isinstance(row, BadRow):
                    raise row
                shape = parse_row_format(row)
            except BadRow as problem:
                raise DataError(f"{source.name}:{line}: {problem}") from None
            if not isinstance(shape, Chat) or shape.messages[-1]["role"] != "assistant":
                raise DataError(
                    f"{source.name}:{line}: the last message is not the assistant's; nothing to compare with"
                )
            if shape.tools:
                raise DataError(f"{source.name}:{line}: has tools, which score cannot give to the model")
            questions.append(Question(list(shape.messages[:-1]), str(shape.messages[-1]["content"]).strip()))
    if not questions:
        raise DataError(f"{path}: no rows to score")
    return questions


def exact_match(model: AdaptedModel, questions: list[Question], adapter: str | None, max_new_tokens: int) -> float:
    """Return the share of questions whose greedy answer equals the expected text exactly."""
    right = 0
    for start in range(0, len(questions), BATCH_ROWS):
        batch = questions[start : start + BATCH_ROWS]
        answers = model.generate(
            [question.prompt for question in batch], [adapter] * len(batch), max_new_tokens=max_new_tokens
        )
        right += sum(answer.strip() == question.answer for answer, question in zip(answers, batch, strict=True))
    return right / len(questions)
