"""The recipe's `data` section: which rows are trained on and held out, and how they are read."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from lorakit.recipe.section import Count, Name, Pattern, Section


def _check_not_empty(names: tuple[Any, ...]) -> tuple[Any, ...]:
    if not names:
        raise ValueError("the list is empty: name at least one")
    return names


def check_columns(columns: dict[Any, str]) -> dict[Any, str]:
    """Return the columns. Raises ValueError: a lone brace, or something else than a column's name in braces."""
    for key, source in columns.items():
        if "{" not in source and "}" not in source:
            continue
        try:
            parts = list(Formatter().parse(source))
        except ValueError as problem:
            raise ValueError(f"{key}: {problem}; write a brace of the text twice: {{{{ or }}}}") from None
        names = [name for _, name, _, _ in parts if name is not None]
        if "" in names or any(form or conversion for _, _, form, conversion in parts):
            raise ValueError(f"{key}: in braces stands a column's name alone, such as {{question}}, got {source!r}")
        if not names:
            raise ValueError(f"{key}: names no column: {source!r}")
    return columns


RowKey = Literal[
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "system", "tools",
    "weight", "chosen", "rejected", "label", "input_ids", "labels", "mask", "loss_mask", "attention_mask", "weights",
    "anchor", "positive", "negative",
]  # fmt: skip
ROW_KEYS: Final[tuple[str, ...]] = get_args(RowKey)
Columns = Annotated[dict[RowKey, Pattern], AfterValidator(check_columns)]
UNIGNORED_KEYS: Final = ("chosen", "rejected", "chosen_rejected", "label", "kto_tag")


def _check_ignored(keys: tuple[str, ...]) -> tuple[str, ...]:
    if worth := [key for key in keys if key in UNIGNORED_KEYS]:
        remedy = "keep the rows with good answers (docs/recipes.md), or name the columns to read in data.columns"
        raise ValueError(f"{worth[0]} says which answers are good, so bad ones would be trained; {remedy}")
    return keys


class SourceSection(Section):
    path: Name | Annotated[tuple[Name, ...], AfterValidator(_check_not_empty)]
    """A file, folder, pattern or hub data set id, or a list of them."""
    subset: Name | None = None
    """Subset of a hub data set that has several, such as `main` of `openai/gsm8k`; also called its configuration."""
    revision: Name | None = None
    """Branch, tag or commit of a hub data set (default: its main branch)."""
    name: Name | None = None
    """Name of the rows where they are counted, and of their held-out loss (default: `path`)."""
    weight: float = Field(1.0, gt=0, le=1000)
    """Passes over these rows in an epoch. 2: every row comes twice. 0.5: half of the rows, the others in the next
    epoch."""
    limit: Count | None = None
    """Number of rows that are read, the first ones; then some of them are held out."""
    eval: float | None = Field(None, ge=0, lt=1)
    """Share of the rows that is held out (default: `data.eval`, if it is a share)."""
    columns: Columns | None = None
    """As `data.columns`, which it replaces for these rows."""
    streaming: bool = False
    """Read a hub data set row by row, `limit` rows of it, and store nothing of it but their tokens."""

    def problems(self) -> Iterator[str]:
        if self.streaming and self.limit is None:
            yield "`streaming`: a stream has no length, so give `limit`, the rows to read"

    @model_serializer(mode="wrap")
    def _given_values(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out defaults, so that a run of this version goes on where a later one has more keys."""
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if value != fields[key].default}

    @property
    def label(self) -> str:
        """Name of the rows: of an absolute path the last part."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        return self.name or " + ".join(Path(path).name if Path(path).is_absolute() else path for path in paths)


def _branch(value: Any) -> str:
    """Return which form of rows is meant, so that errors are about that form alone."""
    if isinstance(value, list | tuple):
        return "list"
    return "SourceSection" if isinstance(value, dict | SourceSection) else "text"


def _branch_or_share(value: Any) -> str:
    return "share" if isinstance(value, int | float) and not isinstance(value, bool) else _branch(value)


_Text = Annotated[Name, Tag("text")]
_Source = Annotated[SourceSection, Tag("SourceSection")]
_Entry = Annotated[
    _Text | _Source,
    Discriminator(
        _branch,
        custom_error_type="list_in_list",
        custom_error_message="a name, or a mapping with `path`, stands in a list; a list of names is `{path: [...]}`",
    ),
]
_List = Annotated[tuple[_Entry, ...], AfterValidator(_check_not_empty), Tag("list")]
_Share = Annotated[float, Field(gt=0, lt=1), Tag("share")]


class DataSection(Section):
    train: Annotated[_Text | _Source | _List, Discriminator(_branch)]
    """Training rows: a file (.jsonl, .json, .csv, .tsv, each also with .gz; .parquet, .arrow), a folder, a pattern such
    as `data/*.jsonl`, a hub data set id, or a list of them. Instead of a name, a mapping gives `path`, `name`,
    `weight`, `limit`, `eval`, `columns` and `streaming`."""
    eval: Annotated[_Text | _Source | _List | _Share, Discriminator(_branch_or_share)] | None = None
    """Held-out rows, in the same forms as `train`, or the share of the training rows that is held out: 0.05."""
    columns: Columns = Field({})
    """Key of a row -> the column of the file that has its value, or a text with columns in braces:
    `{prompt: "Question: {question}\\nAnswer: ", completion: answer}`. Other columns are not read."""
    chat_template: Name | None = None
    """Chat template of conversations, if it is not the tokenizer's own: `alpaca`, `chatml`, `gemma`, `llama3`,
    `mistral`, `phi3`, `vicuna` or `zephyr`, or a file (Jinja). The patch holds it, and brings it with it to `generate`,
    `serve` and `merge`."""
    chat_template_kwargs: dict[Name, bool | int | float | str] = Field({})
    """Variables for the chat template, such as `{enable_thinking: false}` of Qwen3's. The patch holds them, and is
    asked with them. One that the template does not read is an error."""
    max_tokens: int = Field(512, ge=2, le=1_000_000_000)
    """Longest row in tokens."""
    on_long_rows: Literal["stop", "truncate", "drop", "split", "fill"] = "stop"
    """For rows longer than `max_tokens`: stop with an error, or truncate or drop them, counted and reported. `split`
    makes several rows of a long `text`, and stops at other long rows. `fill` joins all rows of `text` end to end, short
    ones too, and cuts rows of `max_tokens`, in which a text is predicted from the text before it too."""
    on_bad_rows: Literal["stop", "skip"] = "stop"
    """For rows that cannot be read: stop with an error, or skip them. Skipped rows are counted and reported."""
    on_shared_rows: Literal["count", "drop", "stop"] = "count"
    """For training rows with the tokens of a held-out row: count them and say so, leave them out of training, or stop
    with an error."""
    loss_on: Literal["answer", "all"] = "answer"
    """Label tokens. `answer`: the assistant's or completion's tokens and their end token. `all`: every token."""
    turns: Literal["auto", "all", "each", "last"] = "auto"
    """Rows of a conversation with several answers. `auto`: one row, where the chat template shows all of them as they
    are asked in use; an answer that it shows otherwise once others follow is a row of its own. `all`: one row, and an
    error where `auto` makes more. `each`: every answer is a row of its own. `last`: only the last answer is trained."""
    ignore_keys: Annotated[tuple[Name, ...], AfterValidator(_check_ignored)] = ()
    """Keys of rows, turns and messages to leave unread. Any other key that is neither read nor harmless is an error.
    Keys that say which answers are good, such as `label` or `rejected`, are refused here."""
    packing: Literal["auto", True, False] = "auto"
    """Pack the rows of a micro-batch into one line, isolated from each other, instead of padding them. `auto`: packed,
    where a trial of the model shows that rows give what they give alone."""
    hub_split: Name = "train"
    """Split to read if `train` is a hub data set id, or the folder of a `DatasetDict`."""
    hub_eval_split: Name = "test"
    """Split to read if `eval` is a hub data set id, or the folder of a `DatasetDict`."""
    cache_gb: float = Field(20.0, ge=0)
    """Size in GB that rows, tokenised or given in Python, may take in the user's cache; the least recently used go."""

    def problems(self) -> Iterator[str]:
        shares = [source for source in self.train_sources() if self.share_of(source)]
        for sources in (self.train_sources(), (*self.eval_sources(), *shares)):
            counts = Counter(source.label for source in sources)
            if repeated := [label for label, number in counts.items() if number > 1]:
                yield f"two sources have the name {repeated[0]!r}: give each its own `name`"
        if isinstance(self.eval, float) and not shares:
            yield f"eval: {self.eval:g}: every source of `train` has `eval: 0`, so no row would be held out"
        if self.on_long_rows == "fill" and self.on_shared_rows != "count":
            why = "compares rows, and `on_long_rows: fill` joins texts into other rows"
            yield f"on_shared_rows: {self.on_shared_rows} {why}; hold out a share instead (eval: 0.05)"
        if self.loss_on == "all" and self.turns in ("each", "last"):
            yield f"turns: {self.turns}: `loss_on: all` trains every token of a conversation, in one row"
        for source in self.eval_sources():
            if source.weight != 1 or source.eval is not None:
                yield f"eval: {source.label}: `weight` and `eval` are keys of sources of `train`"

    def train_sources(self) -> tuple[SourceSection, ...]:
        """Return the sources of training rows. Several names without a mapping are one source."""
        return _sources(self.train)

    def eval_sources(self) -> tuple[SourceSection, ...]:
        """Return the sources of held-out rows that are none of the training rows' sources."""
        return () if self.eval is None or isinstance(self.eval, float) else _sources(self.eval)

    def share_of(self, source: SourceSection) -> float:
        """Return the share of a source of training rows that is held out."""
        if source.eval is not None:
            return source.eval
        return self.eval if isinstance(self.eval, float) else 0.0

    @property
    def has_eval(self) -> bool:
        return bool(self.eval_sources()) or any(map(self.share_of, self.train_sources()))


def _sources(value: Any) -> tuple[SourceSection, ...]:
    entries = value if isinstance(value, tuple) else (value,)
    if not any(isinstance(entry, SourceSection) for entry in entries):
        return (SourceSection(path=value),)
    return tuple(entry if isinstance(entry, SourceSection) else SourceSection(path=entry) for entry in entries)
