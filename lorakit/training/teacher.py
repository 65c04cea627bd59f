"""A teacher's likeliest tokens at each label of a run's rows, from which objective `distill` learns.

They are computed once, before the run's own base is loaded: never are two models in memory, nor does a step pay for the
teacher. They are kept in the user's cache, for every run with this teacher and these rows.

Invariant: a table's folder is named by digests of the rows and of all files of the teacher, so no other is read.

Rows may bring them too, such as those that a server wrote beside its answers:

    {"input_ids": [5, 7, 9], "labels": [-100, -100, 9], "teacher_logprobs": [{"9": -0.1, "4": -2.5}]}

`teacher_logprobs` has an object for each label token of the row, in order: ids (vLLM's `token_id:9` too), and log p.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lorakit.base.find import find_base
from lorakit.base.from_recipe import load_recipe_tokenizer
from lorakit.data.dataset import TeacherTable, TokenDataset, write_teacher
from lorakit.data.load import row_sets
from lorakit.data.rows import read_rows
from lorakit.data.sampler import BatchSampler, collate
from lorakit.data.token_cache import Progress, cache_table
from lorakit.errors import DataError, RecipeError, RunError
from lorakit.files.atomic import cache_folder, fast_digest
from lorakit.files.base_files import open_base_files
from lorakit.files.progress import report_progress
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.inference.load import load
from lorakit.objectives.cross_entropy import select_labelled
from lorakit.objectives.divergence import SMALLEST, with_others
from lorakit.parallel import Engine
from lorakit.patch import Patch, open_patch
from lorakit.patch.find import find_patch
from lorakit.patch.own_head import has_own_head
from lorakit.recipe import Recipe
from lorakit.recipe.schema import BaseSection
from lorakit.run.display import row_progress
from lorakit.run.record import START_OVER
from lorakit.run.start_from import naming_key
from lorakit.training.eval_loss import MICRO_BATCH_SIZE, evaluated

FORMAT: Final = 1  # part of a table's key; change it whenever the same teacher would give other values, or other files
TEACHER: Final = "teacher"  # key of records and patches
KEY: Final = "teacher_logprobs"  # of rows
SLACK: Final = 1e-3  # by which a sum of rounded probabilities may be above 1


def open_teacher(
    recipe: Recipe, datasets: Mapping[str, TokenDataset], engine: Engine, recorded: Mapping[str, Any]
) -> tuple[dict[str, dict[str, str]], dict[str, TeacherTable]]:
    """Return what patches say of a recipe's teacher, and its table of each data set; nothing without one. Collective.

    recorded: the run record of an interrupted run. Once per machine, because its processes read one cache.
    Raises LorakitError: as `find_teacher`; its tokens are others; or it is not the one that the run began with.
    """
    if recipe.objective.name != "distill":
        return {}, {}
    group = engine.group
    facts = group.run_once_per_machine(lambda: _facts(recipe, find_teacher(recipe), datasets))
    if recorded.get(TEACHER, facts) != facts:
        raise RunError(f"objective.teacher: {facts['name']} changed since this run began; put it back, or {START_OVER}")
    engine.set_phase("computing the teacher's probabilities")
    folders = group.run_once_per_machine(lambda: _table_folders(recipe, datasets, facts, engine.device))
    return {TEACHER: facts}, {name: TeacherTable(folders[name], rows) for name, rows in datasets.items()}


def find_teacher(recipe: Recipe) -> Patch | None:
    """Return the patch that teaches; None if a base alone does.

    Raises RecipeError: it is in the run's own output, or has no probabilities of tokens. PatchError: it cannot be read.
    BaseModelError: there is no such base.
    """
    find_base(_teacher_base(recipe).model, _teacher_base(recipe).revision)
    name = recipe.objective.teacher
    if name is None:
        return None
    if Path(recipe.output).resolve() in (folder := Path(name).resolve(), *folder.parents):
        raise RecipeError(f"objective.teacher: {name} is in this run's own output; choose another output")
    with naming_key("objective.teacher"):
        patch = open_patch(find_patch(name))
    if has_own_head(patch):
        raise RecipeError(f"objective.teacher: {name} has labels or rewards, and no probabilities of tokens")
    return patch


def _teacher_base(recipe: Recipe) -> BaseSection:
    """Return the base that teaches, or that the teacher adapts; in the dtype of the run's base."""
    name = recipe.objective.teacher_base
    return recipe.base if name is None else BaseSection(model=name, dtype=recipe.base.dtype)


def _facts(recipe: Recipe, patch: Patch | None, datasets: Mapping[str, TokenDataset]) -> dict[str, str]:
    if recipe.objective.is_taught_by_rows:
        return {"name": KEY, "digest": taught_digest(recipe, datasets)}
    base = _teacher_base(recipe)
    folder = find_base(base.model, base.revision)
    files = [folder / "config.json", *(shard.path for shard in open_base_files(folder).shards)]
    settings = [base.dtype, base.quantize, recipe.objective.settings["top_k"]]
    parts = [FORMAT, [fast_digest(path) for path in files], patch and patch.identity, settings]
    joint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return {"name": Path(recipe.objective.teacher or base.model).name, "digest": joint}


def taught_digest(recipe: Recipe, datasets: Mapping[str, TokenDataset]) -> str:
    """Return the digest of what rows bring of their teacher. Raises DataError, as `likeliest_of_rows`."""
    num_tokens = 1 + max(_vocabulary(recipe).values())
    sides = (likeliest_of_rows(recipe, side, rows, num_tokens) for side, rows in datasets.items())
    digest = hashlib.sha256()
    for values in chain.from_iterable(chain.from_iterable(sides)):
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:32]


def _table_folders(
    recipe: Recipe, datasets: Mapping[str, TokenDataset], facts: Mapping[str, str], device: torch.device
) -> dict[str, Path]:
    """Return the folder of each data set's table, computed now or before."""
    vocabulary = _vocabulary(recipe)
    num_tokens = 1 + max(vocabulary.values())
    load_once = cache(lambda: _load(recipe, vocabulary, device))
    folders = {}
    for side, rows in datasets.items():
        folders[side] = cache_folder("tokens") / f"teacher-{facts['digest']}-{rows.digest[:32]}"
        with row_progress("computing the teacher") as show:

            def write(staging: Path, side: str = side, rows: TokenDataset = rows, show: Progress = show) -> None:
                if recipe.objective.is_taught_by_rows:
                    parts = likeliest_of_rows(recipe, side, rows, num_tokens)
                else:
                    parts = _likeliest(load_once(), rows, num_tokens, int(recipe.objective.settings["top_k"]), show)
                write_teacher(staging, len(rows), f"teacher {facts['name']}", parts)

            cache_table(folders[side], write, show)
    return folders


def _vocabulary(recipe: Recipe) -> dict[str, int]:
    tokenizer = load_recipe_tokenizer(recipe, find_base(recipe.base.model, recipe.base.revision))
    return dict(tokenizer.get_vocab())


def _load(recipe: Recipe, vocabulary: Mapping[str, int], device: torch.device) -> AdaptedModel:
    """Load the teacher. Raises RecipeError: a token of the run's vocabulary is another one there. PatchError."""
    base = _teacher_base(recipe)
    name = recipe.objective.teacher
    own = {"quantize": base.quantize, "revision": base.revision, "tokenizer": base.tokenizer}
    with naming_key("objective.teacher"):
        model = load(base.model, {} if name is None else {TEACHER: name}, dtype=base.dtype, device=device, **own)  # type: ignore[arg-type]
    tokenizer = model.codec(model.adapter(name and TEACHER)).tokenizer
    known = {} if tokenizer is None else tokenizer.get_vocab()
    for token, number in vocabulary.items():
        if known.get(token) != number:
            raise RecipeError(
                f"objective.teacher: its tokens are others: {token!r} is {number} here, and {known.get(token)} there;"
                " a teacher has the tokens of the base that it teaches"
            )
    return model


def _likeliest(
    model: AdaptedModel, rows: TokenDataset, num_tokens: int, top_k: int, progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the likeliest tokens of the labels of all rows in turn and their log p, as `TeacherTable` has them.

    num_tokens: of the run's base, because the head of another may have rows that stand for no token.
    Raises RunError: one is not finite.
    """
    batches = BatchSampler(rows, MICRO_BATCH_SIZE, MICRO_BATCH_SIZE, packing=False, seed=0)
    name = next(iter(model.sources()), None)  # of the adapter that teaches, if one does
    with evaluated(model, name, batches) as (loss_model, device):
        base: Any = model.model
        head = loss_model.head if loss_model.chunked else None
        for start in range(0, len(rows), MICRO_BATCH_SIZE):
            own = range(start, min(start + MICRO_BATCH_SIZE, len(rows)))
            batch = collate(rows, list(own), packing=False).to(device)
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
            values = base(**inputs).logits if head is None else base.base_model(**inputs)[0]
            values, _ = select_labelled(values, batch.labels, batch.label_positions)
            for chunk in [slice(None)] if head is None else head.chunks(values):
                log_p = (values.float() if head is None else head.logits(values[chunk])[0]).log_softmax(-1)
                if not log_p.isfinite().all():
                    raise RunError(f"{rows.location(start)} or the rows after it: the teacher's log p is not finite")
                tokens = log_p[:, :num_tokens].topk(min(top_k, num_tokens)).indices
                yield tokens.cpu(), with_others(log_p, tokens).cpu()
            report_progress()
            progress(own.stop, len(rows))


def likeliest_of_rows(
    recipe: Recipe, side: str, rows: TokenDataset, num_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the rows of a data set bring, row by row, as `TeacherTable` has it. num_tokens: of the vocabulary.

    Raises DataError: a row brings none, or for another number of labels, or fewer than `objective.top_k` tokens.
    """
    top_k = int(recipe.objective.settings["top_k"])
    sources = (source for one in row_sets(recipe) if one.side == side for source in one.sources())
    raw = ((f"{source.name}:{line}", row) for source in sources for line, row in read_rows(source))
    for index in range(len(rows)):
        where = rows.location(index)
        taught = next((row for location, row in raw if location == where), None)
        if taught is None:
            raise DataError(f"{where}: became several rows, whose labels {KEY} does not tell apart; data.turns: last")
        given = taught.get(KEY) if isinstance(taught, Mapping) else None
        count = int(rows.label_mask(index)[1:].sum())
        if not isinstance(given, list) or len(given) != count:
            has = f"{len(given)} entries" if isinstance(given, list) else "none"
            raise DataError(
                f"{where}: {KEY}: one object for each of its {count} label tokens expected, got {has}; or name"
                " objective.teacher"
            )
        best = [_best(entry, top_k, num_tokens, f"{where}: {KEY}: entry {n}") for n, entry in enumerate(given, 1)]
        tokens = torch.tensor([list(one) for one in best], dtype=torch.int64)
        log_p = torch.tensor([list(one.values()) for one in best], dtype=torch.float64)
        others = (1 - log_p.exp().sum(1, keepdim=True)).clamp(min=SMALLEST).log()
        yield tokens, torch.cat([log_p, others], 1).float()


def _best(entry: Any, top_k: int, num_tokens: int, where: str) -> dict[int, float]:
    """Return the likeliest tokens of an entry, and log p of each. Raises DataError: it is not such an object."""
    try:
        known = {int(str(token).removeprefix("token_id:")): float(log_p) for token, log_p in entry.items()}
        if len(known) < len(entry):
            raise ValueError("a token twice")
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise DataError(f"{where}: an object of token ids and log p expected, got {repr(entry)[:60]}") from None
    for token, log_p in known.items():
        if not (0 <= token < num_tokens and -math.inf < log_p <= SLACK):
            raise DataError(f"{where}: {token}: {log_p}: no token of {num_tokens:,}, or no log p up to 0")
    if len(known) < top_k:
        raise DataError(f"{where}: {len(known)} tokens, and objective.top_k is {top_k}; set top_k: {len(known)}")
    if math.fsum(map(math.exp, known.values())) > 1 + SLACK:
        raise DataError(f"{where}: the probabilities add up to more than 1; they are natural logarithms")
    return dict(sorted(known.items(), key=lambda one: (-one[1], one[0]))[:top_k])
