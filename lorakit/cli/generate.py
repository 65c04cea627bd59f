"""generate, score: what a base and its adapters answer."""

import argparse
import sys

from lorakit.cli.arguments import (
    Add,
    adapter_argument,
    base_argument,
    dtype_argument,
    mismatch_argument,
    named,
    positive,
    revision_argument,
)  # fmt: skip
from lorakit.errors import LorakitError

QUANTIZE = ("none", "nf4", "fp4", "int8")


def add_to(command: Add) -> None:
    """The commands and their options."""
    generate = command("generate", _generate, "answer prompts with the base or an adapter")
    _model_arguments(generate)
    generate.add_argument(
        "--use", metavar="NAME", help="adapter to use (default: the first; `none` for the plain base)"
    )
    generate.add_argument(
        "--each", action="store_true", help="answer with the base and with every adapter, in one batch"
    )
    generate.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated (default: standard input)")
    generate.add_argument("--max-new-tokens", type=positive, default=128)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument("--seed", type=int, default=0)

    score = command("score", _score, "exact match on held-out rows, base against adapter")
    _model_arguments(score)
    score.add_argument(
        "--data", action="append", default=[], required=True, metavar="NAME=FILE", help="rows for adapter NAME"
    )
    score.add_argument("--max-new-tokens", type=positive, default=128)
    score.add_argument("--limit", type=positive, help="only the first rows of each file")


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    base_argument(parser)
    adapter_argument(parser)
    revision_argument(parser)
    mismatch_argument(parser)
    dtype_argument(parser)
    parser.add_argument("--quantize", choices=QUANTIZE, default="none", help="pack the base while it is read")


def _generate(options: argparse.Namespace) -> int:
    from lorakit.inference.adapted_model import load

    adapters = named(options.adapter, "--adapter")
    model = load(
        options.base, adapters, dtype=options.dtype, quantize=options.quantize,
        revision=options.revision, allow_base_mismatch=options.allow_base_mismatch,
    )  # fmt: skip
    for note in model.notes:
        print(note, file=sys.stderr)
    if not options.prompt and sys.stdin.isatty():
        print("the prompt, ended with Ctrl-D:", file=sys.stderr)
    prompts = options.prompt or [sys.stdin.read().strip()]
    if options.each and options.use is not None:
        raise LorakitError("--use: --each answers with the base and with every adapter; leave one of them out")
    if options.each:
        uses: list[str | None] = [None, *adapters]
    else:
        use = options.use if options.use is not None else next(iter(adapters), "none")
        uses = [None if use == "none" else use]
    answers = model.generate(
        [prompt for prompt in prompts for _ in uses], uses * len(prompts), max_new_tokens=options.max_new_tokens,
        temperature=options.temperature, seed=options.seed, raw=options.raw,
    )  # fmt: skip
    width = max(len(use or "base") for use in uses)
    for number, (answer, use) in enumerate(zip(answers, uses * len(prompts), strict=True)):
        if len(prompts) > 1 and options.each and number % len(uses) == 0:
            print(f"{'' if number == 0 else chr(10)}{prompts[number // len(uses)]}")
        print(f"{use or 'base':<{width}}  {answer}" if options.each else answer)
    return 0


def _score(options: argparse.Namespace) -> int:
    from lorakit.data import find_sources
    from lorakit.inference.adapted_model import load
    from lorakit.inference.score import score

    data = named(options.data, "--data")
    for path in data.values():
        find_sources(path, "test")  # a missing file is said before the base is loaded
    model = load(
        options.base, named(options.adapter, "--adapter"), dtype=options.dtype, quantize=options.quantize,
        revision=options.revision, allow_base_mismatch=options.allow_base_mismatch,
    )  # fmt: skip
    score(model, data, max_new_tokens=options.max_new_tokens, limit=options.limit, say=print)
    return 0
