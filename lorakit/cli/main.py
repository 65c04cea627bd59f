"""The lorakit command: parse, call one workflow, print."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from lorakit.cli import generate, launch, merge, plan, train
from lorakit.errors import LorakitError, PeerFailure
from lorakit.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 the user can fix it, 75 try again later."""
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    options, rest = parser.parse_known_args(arguments)
    more = [item for item in rest if "=" in item and not item.startswith("-") and "overrides" in options]
    if len(more) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(item for item in rest if item not in more)}")
    if more:  # overrides after a flag
        options.overrides = [*options.overrides, *more]
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except LorakitError as problem:
        gap = "\n" if "\n" in str(problem) else " "
        say_last(f"lorakit {options.command}:{gap}{problem}", of_another=isinstance(problem, PeerFailure))
        return problem.exit_code
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):  # the reader of our output has gone, as in `lorakit show X | head`
            sys.stderr.close()
            return 0
        where = f"{problem.filename}: " if problem.filename else ""
        print(f"lorakit {options.command}: {where}{problem.strerror or problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"lorakit {options.command}: interrupted; the same command begins again or goes on", file=sys.stderr)
        return 75


def say_last(text: str, *, of_another: bool) -> None:
    """Print why the command ends. A worker leaves it to lorakit's launcher, which hears the one that failed itself."""
    if "LORAKIT_PARENT" in os.environ:
        from lorakit.launch.workers import final_message

        if final_message("" if of_another else text):
            return
    print(text, file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The command line. Imports no torch, so that --help is instant."""
    parser = argparse.ArgumentParser(
        prog="lorakit", description="Train, merge and swap LoRA adapters, never silently wrong.",
        epilog="`lorakit COMMAND --help` explains a command. Exit codes: 0 done, 2 you can fix it, 75 try again later.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"lorakit {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    train.add_to(command)
    plan.add_to(command)
    launch.add_to(command)
    generate.add_to(command)
    merge.add_to(command)
    command("doctor", _doctor, "say what this machine can do and what is broken")
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from lorakit.inspection.doctor import doctor

    return 0 if doctor() else 2


if __name__ == "__main__":
    raise SystemExit(main())
