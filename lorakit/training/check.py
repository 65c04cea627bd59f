"""Everything that can be known of a recipe without loading weights: base, targets and their coverage, rows, labels."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lorakit.base.adapter_spec import adapter_spec
from lorakit.base.load import find_base, load_skeleton, load_tokenizer
from lorakit.base.loading import count_parameters
from lorakit.base.skeleton import pack_skeleton
from lorakit.data import TokenDataset
from lorakit.data.token_cache import load_split
from lorakit.errors import LorakitError
from lorakit.lora import adapter_tensors, attach, find_targets
from lorakit.lora.coverage import covering
from lorakit.lora.extra_targets import find_extras
from lorakit.parallel.deepspeed_requirements import check_prerequisites
from lorakit.patch import open_base_files
from lorakit.quant.bnb import check_optimizer
from lorakit.recipe import Recipe
from lorakit.recipe.schema import count_steps, count_warmup_steps
from lorakit.run.record import open_record
from lorakit.training.adapting import check_vocabulary
from lorakit.training.model_checks import check_positions

SHOWN_CHARACTERS = 1200


def check(recipe: Recipe, say: Callable[[str], None] = print) -> None:
    """Print what the recipe would do.

    Raises:
        LorakitError: every problem found, at once.
    """
    problems: list[str] = []

    def attempt(part: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return part(*arguments)
        except LorakitError as problem:
            problems.append(str(problem))
            return None

    folder = attempt(find_base, recipe.base.model, recipe.base.revision)
    if folder is not None:
        attempt(open_base_files, folder)
        tokenizer = attempt(load_tokenizer, folder)
        model = attempt(_check_targets, recipe, folder, say)
        if tokenizer is not None:
            rows = attempt(_check_rows, recipe, tokenizer, say)
            if model is not None and rows is not None:
                attempt(check_vocabulary, model, rows)
                attempt(check_positions, model, recipe.data.max_tokens)
    attempt(check_prerequisites, recipe.parallel)
    attempt(partial(check_optimizer, on_gpu=torch.cuda.is_available()), recipe.train.optimizer)
    if Path(recipe.output).exists():
        attempt(partial(open_record, fresh=False), Path(recipe.output), recipe.model_dump(mode="json"))
    if problems:
        raise LorakitError("\n".join(problems))
    say("\nnothing is wrong with this recipe")


def _check_targets(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> nn.Module:
    spec = adapter_spec(recipe.adapter, folder)
    model = pack_skeleton(load_skeleton(folder), recipe.base, folder, torch.float32)
    targets = find_targets(model, spec)
    extras = find_extras(model, spec, targets)
    covered = covering(model, {target.name for target in targets} | {expert.name for expert in extras.experts})
    total = count_parameters(model)
    num_targets = len(targets) + len(extras.experts)
    with torch.device("meta"):
        attach(model, targets, spec, recipe.train.seed)
    trainable = sum(tensor.numel() for tensor in adapter_tensors(model).values())
    say(f"base       {recipe.base.model}, {type(model).__name__}, {total:,} parameters, in {folder}")
    say(f"targets    {num_targets} layers, with {covered.share:.0%} of the parameters in products")
    if (note := covered.note(spec)) is not None:
        say(f"note       {note}")
    say(f"trainable  {trainable:,} parameters, {trainable / total:.2%} of the base\n")
    say(f"{'layer kind':<20} {'adapted':>8} {'of':>6}")
    for kind in covered.kinds:
        say(f"{kind.name:<20} {kind.adapted:>8} {kind.count:>6}")
    return model


def _check_rows(recipe: Recipe, tokenizer: Any, say: Callable[[str], None]) -> TokenDataset:
    data = recipe.data
    sets = [("train", data.train, data.hub_split)]
    sets += [("eval", data.eval, data.hub_eval_split)] if data.eval is not None else []
    say(f"\n{'rows':<8} {'used':>8} {'bad':>6} {'cut':>6} {'too long':>9} {'tokens':>12} {'learnt':>12}")
    for name, source, split in sets:
        rows = load_split(data, source, split, tokenizer)
        c = rows.counts
        say(
            f"{name:<8} {c.rows:>8,} {c.bad:>6,} {c.truncated:>6,} {c.dropped_long:>9,} {c.tokens:>12,}"
            f" {c.label_tokens:>12,}"
        )
        if name == "train":
            first = rows
    if data.eval is None:
        say("eval     none (data.eval): no held-out loss will be measured")
    steps = count_steps(recipe, len(first))
    warmup = count_warmup_steps(recipe, steps)
    say(f"\nsteps      {steps} of {recipe.train.batch_size} rows, {warmup} of them warm-up")
    say(f"\nfirst row ({first.location(0)}), what is learnt between [[ and ]]:\n{marked(first, 0, tokenizer)}")
    return first


def marked(rows: TokenDataset, row: int, tokenizer: Any) -> str:
    """A row as text, its learnt stretches between [[ and ]]."""
    parts: list[tuple[bool, list[int]]] = []
    for token, learnt in zip(rows.ids(row).tolist(), rows.learnt(row).tolist(), strict=True):
        if parts and parts[-1][0] == learnt:
            parts[-1][1].append(token)
        else:
            parts.append((learnt, [token]))
    decoded = [(learnt, tokenizer.decode(tokens)) for learnt, tokens in parts]
    text = "".join(f"[[{part}]]" if learnt else part for learnt, part in decoded)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
