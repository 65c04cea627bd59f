"""The lorakit command: parse the arguments, run one workflow, map errors to exit codes. Imports no torch."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn, final

from lorakit.cli import generate, inspect, merge, serve, train
from lorakit.cli.arguments import RunCommand
from lorakit.errors import LorakitError, PeerFailure, TemporaryFailure, check_platform
from lorakit.files.text import printable
from lorakit.launch.interrupts import INTERRUPTED, interrupts_end_imports
from lorakit.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 the user can fix it, 75 try again later."""
    arguments = sys.argv[1:] if arguments is None else arguments
    interrupted = f"{' '.join(['lorakit', *arguments[:1]])}: {INTERRUPTED}"
    try:
        with interrupts_end_imports(interrupted):
            return _run(arguments)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return TemporaryFailure.exit_code


def _run(arguments: Sequence[str]) -> int:
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 2
    options, rest = parser.parse_known_args(arguments)
    # argparse fills `overrides` before the first flag only, so `train r.yaml --fresh train.steps=3` leaves a rest
    overrides = [item for item in rest if "=" in item and not item.startswith("-") and "overrides" in options]
    if len(overrides) < len(rest):
        options.parser.error(f"unrecognized arguments: {' '.join(item for item in rest if item not in overrides)}")
    if overrides:
        options.overrides = [*options.overrides, *overrides]
    run: RunCommand = options.run
    try:
        check_platform()
        # says for each part of a linear attention that its kernel for GPUs is not installed (docs/recipes.md)
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
        return run(options) or 0
    except LorakitError as problem:
        from lorakit.launch.workers import send_failure_message

        gap = "\n" if "\n" in str(problem) else " "
        text = f"lorakit {options.command}:{gap}{problem}"
        # a launcher prints one message for all workers; a peer that failed first sends its own
        if not send_failure_message("" if isinstance(problem, PeerFailure) else text):
            print(printable(text), file=sys.stderr)
        return problem.exit_code
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):  # the reader of standard output exited, as in `lorakit show X | head`
            sys.stderr.close()
            return 0
        where = f"{problem.filename}: " if problem.filename else ""
        print(f"lorakit {options.command}: {where}{problem.strerror or problem}", file=sys.stderr)
        return 2


@final
class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` explains it\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the command line. Imports no torch, so that --help is instant."""
    parser = _Parser(
        prog="lorakit", description="Train, merge and swap LoRA adapters, never silently wrong.",
        epilog="`lorakit COMMAND --help` explains a command. Exit codes: 0 done, 2 you can fix it, 75 try again later.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"lorakit {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_command(name: str, run: RunCommand, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, parser=added)
        return added

    train.add_train_commands(add_command)
    generate.add_generate_commands(add_command)
    serve.add_serve_commands(add_command)
    merge.add_merge_commands(add_command)
    inspect.add_inspect_commands(add_command)
    return parser
