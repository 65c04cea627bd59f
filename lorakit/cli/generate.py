"""generate, score: the answers of a base and its adapters."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorakit.cli.arguments import (
    AddCommand,
    add_adapted_base,
    add_columns_option,
    add_metric_option,
    add_repeated,
    given,
    parse_columns,
    parse_named,
    parse_template_kwargs,
    picked,
    positive_int,
    print_line,
    refuse,
)
from lorakit.errors import LorakitError, check_absent, did_you_mean, translate_error
from lorakit.files.text import full_dtype_name

if TYPE_CHECKING:
    from lorakit.data.row_settings import RowSettings
    from lorakit.inference.adapted_model import AdaptedModel

# written out because the loader imports torch and the recipe pydantic, too slow for --help; a test compares
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZE = ("none", "nf4", "fp4", "int8", "fp8")
OF_SCORES = ("predictions", "max_new_tokens")
OF_ANSWERS = ("max_new_tokens", "temperature", "seed", "raw")
LOSS = "loss"
MEASURES = ("exact_match", "prefix", "numeric", "json_fields", "rouge_1", "rouge_2", "rouge_l", "bleu")


def add_generate_commands(add_command: AddCommand) -> None:
    generate = add_command("generate", _generate, "answer prompts with the base or an adapter")
    add_model_arguments(generate)
    generate.add_argument("--use", metavar="NAME", help="the adapter (default: the first; `none` for the plain base)")
    generate.add_argument("--each", action="store_true", help="answer with the base and all adapters, in one batch")
    raw = "give prompts as they are, without the chat template (default: as the adapter's rows were in training)"
    generate.add_argument("--raw", action=argparse.BooleanOptionalAction, default=None, help=raw)
    generate.add_argument("--tools", metavar="FILE", help="JSON list of tools, in OpenAI's form, for the chat template")
    prompt = "a prompt (default: standard input, all of it one prompt, without the line break at its end)"
    add_repeated(generate, "--prompt", "TEXT", prompt)
    generate.add_argument("--max-new-tokens", type=positive_int, help="(default: 128)")
    generate.add_argument("--temperature", type=float, help="0 (the default) is greedy")
    generate.add_argument("--seed", type=int, help="of the draws with a temperature (default: 0)")

    about = "exact match, loss and other measures on held-out rows: of a base or merged model, and its adapters"
    score = add_command("score", _score, about)
    add_model_arguments(score)
    data = "rows for the base and adapter NAME; without a name for the base and every adapter"
    add_repeated(score, "--data", "[NAME=]FILE", data, required=True)
    score.add_argument("--max-new-tokens", type=positive_int, help="(default: 128)")
    score.add_argument("--limit", type=positive_int, help="only the first rows of each file")
    add_columns_option(score)
    add_repeated(score, "--ignore-keys", "KEY", "key of rows and messages to leave unread")
    bad_rows = "of rows that cannot be asked, also too long ones: stop (default), or leave them out by name"
    score.add_argument("--on-bad-rows", choices=("stop", "skip"), default="stop", help=bad_rows)
    score.add_argument("--predictions", metavar="FILE", help="write every answer, one JSON line each")
    score.add_argument("--confusion", metavar="FILE", help="draw which labels a classifier took for which, as PNG")
    max_tokens = "longest row in tokens, of --measure loss (default: that of the adapters' training, or 512)"
    score.add_argument("--max-tokens", type=positive_int, help=max_tokens)
    measure = f"besides exact match, as in recipes: {', '.join(MEASURES)}; or loss: held-out, alone without answers"
    add_repeated(score, "--measure", "NAME", measure, choices=(*MEASURES, LOSS))
    add_metric_option(score)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a base, its adapters, and how they are loaded."""
    add_adapted_base(parser)
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer, if it is not the base's own")
    template = "chat template: a name such as chatml, or a file (default: that of training, else the tokenizer's)"
    parser.add_argument("--chat-template", metavar="FILE", help=template)
    kwargs = "variables for the chat template, such as '{\"enable_thinking\": false}' (default: as in training)"
    parser.add_argument("--chat-template-kwargs", metavar="JSON", type=parse_template_kwargs, default={}, help=kwargs)
    dtype = "dtype of the base (default: auto, the fastest that this machine computes correctly)"
    parser.add_argument("--dtype", type=full_dtype_name, choices=DTYPES, default="auto", help=dtype)
    quantize = "quantise the base while it is read (default: none)"
    parser.add_argument("--quantize", choices=QUANTIZE, default="none", help=quantize)


def _generate(options: argparse.Namespace) -> None:
    adapters = parse_named(options.adapter, "--adapter")
    if options.each and options.use is not None:
        raise LorakitError("--use: --each answers with the base and with every adapter; leave one of them out")
    if not options.temperature:
        refuse(options, ("seed",), "goes with a --temperature above 0; greedy answers have no draws")
    use = options.use if options.use is not None else next(iter(adapters), "none")
    # the adapters that answer each prompt; None is the plain base
    uses = [None, *adapters] if options.each else [None if use == "none" else use]
    tools = None if options.tools is None else _read_tools(Path(options.tools))
    # standard input after loading, so that mistakes are told before anyone types
    prompts = _check_prompts("--prompt", options.prompt) if options.prompt else []
    model = load_model(options, adapters)
    prompts = prompts or _check_prompts("standard input", [_read_prompt()])
    if len(adapters) > 1 and options.use is None and not options.each:
        text = f"answers, the first of {len(adapters)}; choose with --use NAME or --each"
        print(f"note: {uses[0]} {text}", file=sys.stderr)
    plain = [use for use in uses if use is not None and model.sources()[use].form.raw]
    if plain and options.raw is None and getattr(model.tokenizer, "chat_template", None):
        text = "is asked in plain text, as in training, and the base through its chat template (both alike: --raw)"
        print(f"note: {', '.join(plain)} {text}", file=sys.stderr)
    settings = given(options, *OF_ANSWERS)
    head = next(filter(None, (model.codec(model.adapter(use)).head for use in uses)), None)
    if head is not None:
        refuse(options, (*OF_ANSWERS, "tools"), "goes with answers; labels and rewards are of texts as in training")
        uses = [use for use in uses if use is not None]  # of --each without the base, which has no such head
    requested = [prompt for prompt in prompts for _ in uses], uses * len(prompts)
    if head is None:
        _print_slots_note(model)
        answers = model.generate(*requested, tools=tools, **settings)
    else:
        answers = list(map(str, model.classify(*requested) if head.labels else model.reward(*requested)))
    width = max(len(use or "base") for use in uses)
    for number, (answer, use) in enumerate(zip(answers, uses * len(prompts), strict=True)):
        if len(prompts) > 1 and options.each and number % len(uses) == 0:
            print(f"{'' if number == 0 else chr(10)}{prompts[number // len(uses)]}")
        print(f"{use or 'base':<{width}}  {answer}" if options.each else answer)


def _read_tools(path: Path) -> list[Any]:
    with translate_error((OSError, ValueError), LorakitError, f"--tools {path}: cannot be read"):
        tools = json.loads(path.read_bytes())
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise LorakitError(f"--tools {path}: a list of tools expected, as in `tools` of OpenAI's requests")
    return tools


def _read_prompt() -> str:
    """Return all of standard input without the line break at its end, which `echo` adds."""
    if sys.stdin.isatty():
        print("the prompt, ended with Ctrl-D:", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")


def _check_prompts(where: str, prompts: list[str]) -> list[str]:
    if not all(prompt.strip() for prompt in prompts):
        raise LorakitError(f"{where}: an empty prompt")
    return prompts


def load_model(
    options: argparse.Namespace, adapters: dict[str, str], prompted_as: Iterable[str] = ()
) -> "AdaptedModel":
    """Load the base and its adapters, and print what could not be verified of them.

    prompted_as: patches that are loaded later, and may bring a chat template with them.
    """
    from lorakit.base.find import find_base, find_tokenizer
    from lorakit.base.transformers_io import check_tokenizer
    from lorakit.inference.load import load
    from lorakit.patch.prompting import read_chat_template

    # before the base is loaded
    check_tokenizer(find_tokenizer(options.tokenizer, find_base(options.base, options.revision)))
    own = None if options.chat_template is None else read_chat_template(options.chat_template, "--chat-template")
    settings = picked(options, "dtype", "quantize", "revision", "tokenizer", "allow", "chat_template_kwargs")
    model = load(options.base, adapters, chat_template=own, prompted_as=prompted_as, **settings)
    for note in model.notes:
        print(note, file=sys.stderr)
    return model


def _print_slots_note(model: "AdaptedModel") -> None:
    if note := model.slots_note:
        print(f"note: {note}", file=sys.stderr)


def _score(options: argparse.Namespace) -> None:
    from lorakit.data.find_rows import find_sources
    from lorakit.data.row_settings import RowSettings
    from lorakit.inference.measures import chosen_measures, load_metrics
    from lorakit.inference.score import print_scores, score, write_predictions
    from lorakit.run.display import row_progress
    from lorakit.training.eval_loss import eval_losses, print_losses

    adapters = parse_named(options.adapter, "--adapter")
    data = _adapters_by_file(options.data, adapters)
    # mistakes before the base is loaded
    columns = parse_columns(options.columns)
    measures = chosen_measures([name for name in options.measure if name != LOSS], load_metrics(options.metric))
    answers = bool(measures) or LOSS not in options.measure
    if not answers:
        refuse(options, OF_SCORES, "--measure loss answers no row; add --measure exact_match")
    if LOSS not in options.measure:
        refuse(options, ("max_tokens",), "goes with --measure loss; --max-new-tokens is the room for an answer")
    for path in data:
        find_sources(path, "test")
    predictions = _new_file(options.predictions, "--predictions")
    confusion = _new_file(options.confusion, "--confusion")
    if unused := [name for name in adapters if not any(name in names for names in data.values())]:
        print(f"note: {', '.join(unused)}: no --data, not scored", file=sys.stderr)
    model = load_model(options, adapters)
    own = {"ignore_keys": tuple(options.ignore_keys), "columns": tuple(sorted(columns.items()))}
    settings = RowSettings(**picked(options, "on_bad_rows", "limit") | own)
    if _score_heads(options, model, data, settings, predictions, confusion):
        return
    embeds = _embeds(model, data, of_answers=bool(measures) or bool(given(options, *OF_SCORES)))
    if embeds or LOSS in options.measure:
        losses = eval_losses(model, data, partial(row_progress, "scoring"), settings, options.max_tokens)
        print_losses(losses, print_line)
    if answers and not embeds:
        _print_slots_note(model)
        progress = partial(row_progress, "answering")
        scores = score(model, data, settings, measures=measures, progress=progress, **given(options, "max_new_tokens"))
        if predictions is not None:
            write_predictions(predictions, scores, measures)
        print_scores(scores, measures, print_line)


def _new_file(name: str | None, option: str) -> Path | None:
    """Return a file to write. Raises LorakitError: it is there already, or cannot be written."""
    path = None if name is None else Path(name)
    check_absent(path, option)
    if path is not None and not os.access(path.parent, os.W_OK):
        raise LorakitError(f"{option}: {path.parent} is no folder that can be written to")
    return path


def _embeds(model: "AdaptedModel", data: Mapping[str, list[str | None]], *, of_answers: bool) -> bool:
    """True if an adapter of a file's rows gives embeddings; of_answers: which is wrong, as answers are measured."""
    named = {name for names in data.values() for name in names if name is not None}
    embed = {name for name in named if model.codec(model.adapter(name)).pooling}
    if embed and (of_answers or embed != named):
        others = ", ".join(sorted(named - embed)) or "--measure, --predictions, --max-new-tokens"
        raise LorakitError(f"{others}: of answers; score embeddings by themselves, they have measures of their own")
    return bool(embed)


def _score_heads(
    options: argparse.Namespace,
    model: "AdaptedModel",
    data: Mapping[str, list[str | None]],
    settings: "RowSettings",
    predictions: Path | None,
    confusion: Path | None,
) -> bool:
    """Score adapters that have a head of their own; return False if none has."""
    from lorakit.inference.score_heads import print_head_scores, score_heads, write_head_answers
    from lorakit.run.charts import draw_confusion
    from lorakit.run.display import row_progress

    named = {path: [name for name in names if name is not None] for path, names in data.items()}
    if not any(model.codec(model.adapter(name)).head for names in named.values() for name in names):
        if confusion is not None:
            raise LorakitError("--confusion: no adapter classifies; objective classify trains one")
        return False
    refuse(options, ("measure", "metric", "max_new_tokens"), "of answers, and not of labels and rewards")
    scores = score_heads(model, named, settings, partial(row_progress, "scoring"))
    if predictions is not None:
        write_head_answers(predictions, scores)
    print_head_scores(scores, print_line)
    if confusion is not None:
        draw_confusion(confusion, [table for one in scores if (table := one.confusion()) is not None])
        print_line(f"drew {confusion}")
    return True


def _adapters_by_file(items: list[str], adapters: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Return file -> the adapters that answer its rows, after the base (None): one by NAME=FILE, all by FILE."""
    by_file: dict[str, list[str | None]] = {}
    # because a path may hold "=" too, such as lang=en/rows.jsonl
    named = [item for item in items if "=" in item and not (item.split("=")[0] not in adapters and Path(item).exists())]
    parse_named(named, "--data")
    for item in items:
        name, path = item.split("=", 1) if item in named else (None, item)
        if name is not None and name not in adapters:
            loaded = ", ".join(adapters) or f"none; --data {path} scores the base alone"
            raise LorakitError(f"--data {name}: no such adapter (loaded: {loaded}).{did_you_mean(name, adapters)}")
        answering = by_file.setdefault(path, [None])
        answering += [each for each in ([name] if name else adapters) if each not in answering]
    return by_file
