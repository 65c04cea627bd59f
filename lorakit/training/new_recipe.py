"""Write a recipe for a base and a file of rows: ``lorakit init``.

Objective, columns, held-out share and max_tokens follow from base and rows; the others are usual values.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any, Final

from lorakit.base.find import find_base
from lorakit.base.layers import num_positions, num_steady_positions
from lorakit.base.quantized import count_parameters
from lorakit.base.transformers_io import load_skeleton, load_tokenizer
from lorakit.data.chat_template import switches_thinking
from lorakit.data.encode import Encoder
from lorakit.data.find_rows import find_sources
from lorakit.data.head_labels import VERDICTS, finite_number, label_name
from lorakit.data.pairs import ANSWERS, TEXTS
from lorakit.data.row_files import BadRow, decode_line
from lorakit.data.row_formats import FORMATS, UNTHINKING, Encoded, usual_columns
from lorakit.data.row_settings import Columns, RowSettings, map_columns
from lorakit.data.rows import RowSource, read_raw, read_rows
from lorakit.errors import DataError
from lorakit.files.text import count as number_text
from lorakit.files.text import size
from lorakit.ops.encoder_head import MEAN, is_encoder
from lorakit.patch.pooling import MODULES, read_pooling
from lorakit.patch.prompting import NAMED_TEMPLATES, read_chat_template
from lorakit.quant.files import quantization_config
from lorakit.recipe.objective import MAX_NEGATIVES, MAX_SEVERAL, ObjectiveSection, ProblemType
from lorakit.training.learning_rate import SMALL_BASE

TEMPLATE: Final = Path(__file__).parent.parent / "assets" / "new_recipe.yaml"
SAMPLE_ROWS: Final = 500
TOKEN_STEP: Final = 64  # max_tokens is a multiple of it
BATCH_SIZE: Final = 16
ENOUGH_STEPS: Final = 300  # steps of few rows, in up to MAX_EPOCHS passes
MAX_EPOCHS: Final = 10
EVAL_SHARE: Final = 0.05  # of the training rows, held out where no held-out rows are named
ENOUGH_TO_HOLD_OUT: Final = 400  # rows, so that about 20 are held out
QUANTIZE_LINE: Final = "  # quantize: nf4    # 4 bits instead of {} in 16; needs `pip install 'lorakit[quant]'`\n"
SWITCH_LINE: Final = "  # chat_template_kwargs: {enable_thinking: false}    # no row thinks (docs/qwen3.md)\n"
SHOWN_LETTERS: Final = 300  # of the reason of a bad row

MAX_LABELS: Final = 500
MAX_LETTERS: Final = 100  # of a label
PAIR_NOTE: Final = "    # others: docs/recipes.md, 'Pairs of answers'"
RATES: Final = {
    "sft": ("2e-3", "2e-4"), "dpo": ("5e-4", "1e-5"), "kto": ("5e-4", "1e-5"), "classify": ("1e-3", "1e-4"),
    "embed": ("2e-3", "1e-4"),
}  # fmt: skip
"""objective -> learning rate on a small base, and on others"""
FORM_KEYS: Final = (ANSWERS, TEXTS[:2], *(form.required for form in FORMATS))  # of rows, of each form
PLAIN_FORMS: Final = {"prompt + completion", "text", "input_ids", "anchor + positive"}  # that no chat template writes


@dataclass(frozen=True)
class BaseFacts:
    """What a recipe's values follow from: of the base. positions: None if its config names no limit."""

    name: str
    architecture: str
    num_parameters: int
    positions: int | None
    pooling: str | None = None  # of embeddings, where the base says it or is an encoder
    is_quantized: bool = False  # in its files


@dataclass(frozen=True)
class RowFacts:
    """What a recipe's values follow from: of the rows."""

    names: tuple[str, ...]
    count: int
    num_rows: int  # that they become, as several of a conversation's turns; a pair is one
    sampled: int
    form: str
    lengths: tuple[int, ...]  # tokens of each usable sampled row
    num_eval: int  # of the sampled rows, those that EVAL_SHARE holds out
    has_switch: bool  # no row thinks, and the chat template has a switch for that
    notes: tuple[str, ...]  # what is to be mended in the rows
    columns: Columns = ()
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)

    @property
    def can_hold_out(self) -> bool:
        """True if a share is enough rows to measure: copies are on one side, so of many copies it is none or all."""
        return self.count >= ENOUGH_TO_HOLD_OUT and 0 < self.num_eval < len(self.lengths)


def read_base(name: str) -> tuple[BaseFacts, Any]:
    """Return the facts of a base, from its config, and its tokenizer. Raises BaseModelError: no such base."""
    folder = find_base(name)
    tokenizer = load_tokenizer(folder)
    model = load_skeleton(folder)
    limits = [limit for limit in (num_positions(model.config), num_steady_positions(model.config)) if limit is not None]
    pooling = read_pooling(folder).mode if (folder / MODULES).is_file() else MEAN if is_encoder(model) else None
    is_quantized = quantization_config(folder) is not None
    positions = min(limits, default=None)
    facts = BaseFacts(name, type(model).__name__, count_parameters(model), positions, pooling, is_quantized)
    return facts, tokenizer


def add_named_template(tokenizer: Any) -> str | None:
    """Give a tokenizer without a chat template one by name, and return its name; None: it has one.

    The first one of whose tokens it has all; else alpaca, which is plain text.
    """
    if tokenizer.chat_template:
        return None
    vocabulary = tokenizer.get_vocab()
    fitting = (name for name, tokens in NAMED_TEMPLATES.items() if tokens and vocabulary.keys() >= set(tokens))
    name = next(fitting, "alpaca")
    tokenizer.chat_template = read_chat_template(name)
    return name


def find_columns(names: tuple[str, ...], tokenizer: Any) -> Columns:
    """Return the columns of a prompt and its answer, if the first row has no form of rows, and their usual names.

    Raises DataError: it has no form of rows, and not one column of each.
    """
    rows = (row for source in find_sources(names, "train") for _, row in read_rows(source))
    row = next((row for row in rows if isinstance(row, dict)), {})
    if not row or any(row.keys() >= set(keys) for keys in FORM_KEYS) or row.keys() & set(ANSWERS):
        return ()
    if not (columns := usual_columns(row)):
        raise DataError(
            f"data: {', '.join(names)}: its columns are {', '.join(map(repr, row))}; say which is the prompt and which"
            " the answer: --columns instruction=COLUMN output=COLUMN (or text=COLUMN alone)"
        )
    if tokenizer.chat_template:
        return tuple(columns.items())
    prompt = "".join(f"{{{columns[key]}}}\n" for key in ("instruction", "input") if key in columns)
    return (("prompt", prompt), ("completion", columns["output"]))


def read_sample(
    names: tuple[str, ...], tokenizer: Any, columns: Columns = (), objective: ObjectiveSection | None = None
) -> RowFacts:
    """Return the facts of rows: their number, and form and lengths of a sample that is spread over all of them.

    columns: as `data.columns`; empty: the keys of a row are those of the file. objective: None is the one that the keys
    of the first row are of.
    Raises DataError: no such file, or no row of the sample can be used.
    """
    sources = find_sources(names, "train")
    count = sum(1 for _ in _raw_rows(sources))
    stride = max(1, math.ceil(count / SAMPLE_ROWS))
    objective = objective or find_objective(sources, columns)
    encode = Encoder(tokenizer, RowSettings(**objective.row_settings))
    lengths = list[int]()
    bad = list[str]()
    forms = Counter[str]()
    eval_side = RowSettings(columns=columns, eval_share=EVAL_SHARE, eval_side=True)
    num_eval = 0
    encoded = list[Encoded]()
    for source, line, raw in islice(_raw_rows(sources), 0, None, stride):
        raw_row = decode_line(raw)
        row = map_columns(raw_row, columns)
        try:
            own = encode(row)
            lengths.append(max(len(one.ids) for one in own))
            encoded += own
            forms[_form_of(row)] += 1
            num_eval += eval_side.is_on_side(raw_row)
        except BadRow as problem:
            bad.append(f"{source.name}:{line}: {problem}")
    if not count:
        raise DataError(f"data: {', '.join(names)}: no rows in it; write a row on each line, or name another file")
    if not lengths:
        raise DataError(f"data: none of {len(bad)} rows of {', '.join(names)} can be used; the first: {bad[0]}")
    sampled = len(lengths) + len(bad)
    first = " ".join(bad[0].split())[:SHOWN_LETTERS] if bad else ""
    notes = (f"{len(bad)} of {sampled} sampled rows cannot be used; the first: {first}",) if bad else ()
    form = ", ".join(forms)
    num_rows = math.ceil(count * len(encoded) / len(lengths) / objective.group_size)
    switch = switches_thinking(tokenizer) and all(UNTHINKING in one.notes for one in encoded)
    return RowFacts(names, count, num_rows, sampled, form, tuple(lengths), num_eval, switch, notes, columns, objective)


def find_objective(sources: list[RowSource], columns: Columns) -> ObjectiveSection:
    """Return the objective for rows, by the first one's keys and all labels. Raises DataError: they are no classes."""
    mapped = (map_columns(decode_line(raw), columns) for _, _, raw in _raw_rows(sources))
    rows = (row for row in mapped if isinstance(row, dict))
    first = next(rows, {})
    if first.keys() >= set(ANSWERS):
        return ObjectiveSection(name="dpo", beta=0.1)
    if first.keys() >= set(TEXTS[:2]):
        given = [first[key] for key in first if re.fullmatch(rf"{TEXTS[2]}(_\d+)?", key) and first[key] is not None]
        negatives = sum(len(one) if isinstance(one, list) else 1 for one in given)
        return ObjectiveSection(name="embed", negatives=min(negatives, MAX_NEGATIVES) or None)
    if "label" not in first:
        return ObjectiveSection()
    labels = (row["label"] for row in chain([first], rows) if row.get("label") is not None)
    return _classifier(labels, has_prompt=not first.keys() & {"text", "messages"})


def _are_numbers(labels: Iterable[Any]) -> bool:
    """True if all labels are numbers, or texts that are, and one has a fraction."""
    has_fraction = False
    for label in labels:
        value = finite_number(label)
        if value is None:
            return False
        has_fraction = has_fraction or not value.is_integer()
    return has_fraction


def _classifier(given: Iterator[Any], *, has_prompt: bool) -> ObjectiveSection:
    """Return the objective of rows with these labels. has_prompt: a label may say whether a row's answer is good."""
    first = next(given, None)
    is_list = isinstance(first, list)
    labels = set[str]()
    given, numbers = tee(chain([first], given))
    if not is_list and _are_numbers(numbers):
        return ObjectiveSection(name="classify", problem_type="regression")
    for label in given:
        for one in label if is_list and isinstance(label, list) else [label]:
            name = label_name(one)
            is_class = isinstance(one, str | int | float) and name.strip() and name.isprintable()
            if not is_class or len(name) > MAX_LETTERS:
                raise DataError(f"label: {name[:40]!r}; objective `classify` takes short texts and numbers")
            labels.add(name)
        most, where = (MAX_SEVERAL, " in lists") if is_list else (MAX_LABELS, "")
        if len(labels) > most:
            raise DataError(f"label: more than {most} different ones{where}; objective `classify` is for fewer")
    if has_prompt and labels <= VERDICTS.keys() and not is_list:
        return ObjectiveSection(name="kto", beta=0.1)
    if len(labels) < 2:
        raise DataError(f"label: {len(labels)} different ones; objective `classify` takes two or more")
    kind: ProblemType | None = "multi_label_classification" if is_list else None
    return ObjectiveSection(name="classify", labels=tuple(sorted(labels)), problem_type=kind)


def _form_of(row: Mapping[str, Any]) -> str:
    return " + ".join(next(keys for keys in FORM_KEYS if row.keys() >= set(keys)))


def _raw_rows(sources: list[RowSource]) -> Iterator[tuple[RowSource, int, Any]]:
    return ((source, line, raw) for source in sources for line, raw in read_raw(source))


def recipe_text(
    base: BaseFacts, rows: RowFacts, eval_rows: RowFacts | None, output: str, template: str | None = None
) -> str:
    """Return a recipe as YAML with comments. output: folder of the run. template: result of ``add_named_template``."""
    max_tokens, why_tokens = _max_tokens(base, [rows, *([eval_rows] if eval_rows else [])])
    too_long = sum(length > max_tokens for length in rows.lengths)
    drops = f"  on_long_rows: drop    # {too_long} of {rows.sampled} sampled rows are longer; `truncate` cuts them\n"
    named = f"  chat_template: {template}    # the base has none; others by name: {', '.join(NAMED_TEMPLATES)}\n"
    pairs = ", ".join(f"{key}: {json.dumps(source, ensure_ascii=False)}" for key, source in rows.columns)
    columns = f"  columns: {{{pairs}}}    # `lorakit check` shows the first row, and counts the other columns\n"
    parameters = base.num_parameters
    objective = rows.objective
    if objective.name == "embed" and base.pooling is not None:
        objective = objective.model_copy(update={"pooling": base.pooling})
    given = {key: json.dumps(value, ensure_ascii=False) for key, value in objective.model_dump().items()}
    values = ", ".join(f"{key}: {value}" for key, value in (given | {"name": objective.name}).items())
    objective_line = f"objective: {{{values}}}{PAIR_NOTE if objective.name == 'dpo' else ''}\n"
    epochs = min(MAX_EPOCHS, math.ceil(ENOUGH_STEPS * BATCH_SIZE / rows.num_rows))
    return TEMPLATE.read_text(encoding="utf-8").format(
        base=base,
        rows=rows,
        size=number_text(parameters),
        template="with a chat template" if template is None else "without a chat template",
        positions=f"{base.positions:,} positions" if base.positions else "no limit of positions",
        sampled="all of them" if rows.sampled == rows.count else f"a sample of {rows.sampled:,}",
        usual=sorted(rows.lengths)[math.ceil(0.9 * len(rows.lengths)) - 1],
        longest=max(rows.lengths),
        notes="".join(f"# note: {note}\n" for note in rows.notes),
        model=_scalar(base.name),
        quantize="" if base.is_quantized else QUANTIZE_LINE.format(size(2 * parameters)),
        train=_names(rows.names),
        columns=columns if rows.columns else "",
        chat_template="" if template is None or set(rows.form.split(", ")) <= PLAIN_FORMS else named,
        switch=SWITCH_LINE if rows.has_switch else "",
        eval=_eval_line(rows, eval_rows),
        max_tokens=max_tokens,
        why_tokens=why_tokens,
        epochs=epochs,
        steps=epochs * math.ceil(rows.num_rows / BATCH_SIZE),
        batch_size=BATCH_SIZE,
        long=drops if too_long or max_tokens == base.positions else "",
        rate=RATES[objective.name][parameters >= SMALL_BASE],
        objective="" if objective.name == "sft" else objective_line,
        eval_every="  eval_every_steps: 50\n" if eval_rows or rows.can_hold_out else "",
        output=_scalar(output),
    )


def _max_tokens(base: BaseFacts, sets: Sequence[RowFacts]) -> tuple[int, str]:
    """Return data.max_tokens, and why. sets: training and held-out rows."""
    longest = max(length for rows in sets for length in rows.lengths)
    sees_all = all(rows.sampled == rows.count for rows in sets)
    wanted = math.ceil(longest * (1 if sees_all else 2) / TOKEN_STEP) * TOKEN_STEP
    if base.positions is not None and wanted > base.positions:
        return base.positions, "as many as the base has positions"
    why = "room for the longest row" if sees_all else "twice the longest sampled row; shorter rows cost no more"
    return wanted, why


def _eval_line(rows: RowFacts, eval_rows: RowFacts | None) -> str:
    """Return the line of data.eval, which is a comment where nothing is held out."""
    if eval_rows:
        return f"  eval: {_names(eval_rows.names)}"
    if rows.can_hold_out:
        return f"  eval: {EVAL_SHARE}    # about {round(EVAL_SHARE * rows.count, -1):,.0f} rows held out"
    few = rows.count < ENOUGH_TO_HOLD_OUT
    why = f"{rows.count} are too few to hold some out" if few else "too many of these are the same"
    return f"  # eval: held-out.jsonl    # rows to test with, of your own: {why}"


def _names(names: tuple[str, ...]) -> str:
    return _scalar(names[0]) if len(names) == 1 else f"[{', '.join(map(_scalar, names))}]"


def _scalar(text: str) -> str:
    """Return text as a YAML value: as it is if that is plain, else in quotes."""
    plain = re.fullmatch(r"[A-Za-z./][\w./:-]*[\w/]", text) and text.lower() not in ("null", "true", "false")
    return text if plain else json.dumps(text, ensure_ascii=False)


def free_output(data: str) -> str:
    """Return a folder of adapters/ that does not exist yet, named after a file of rows, or the folder of a pattern."""
    names = (re.split(r"[.*?\[]", part.strip("/"))[0] for part in reversed(Path(data).parts))
    stem = next(filter(None, names), "mine")
    numbered = (f"adapters/{stem}{f'-{number}' if number > 1 else ''}" for number in range(1, 1000))
    return next(name for name in numbered if not Path(name).exists())
