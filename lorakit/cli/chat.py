"""chat: talk to a base and its adapters in a terminal."""

import argparse
import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Final

from lorakit.cli.arguments import AddCommand, parse_named
from lorakit.cli.generate import add_model_arguments, load_model
from lorakit.errors import LorakitError, did_you_mean

if TYPE_CHECKING:
    from lorakit.serving.conversation import Conversation

HELP: Final = """\
/use NAME  the adapter that answers from now on (none: the base)
/clear     begin a new conversation
/quit      or the end of the input"""


def add_chat_commands(add_command: AddCommand) -> None:
    chat = add_command("chat", _chat, "talk to a base and its adapters, and switch between them")
    add_model_arguments(chat)
    chat.add_argument("--use", metavar="NAME", help="adapter that answers first (default: the first; `none`: the base)")
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")


def _chat(options: argparse.Namespace) -> None:
    adapters = parse_named(options.adapter, "--adapter")
    first = options.use or next(iter(adapters), "none")
    if first not in (*adapters, "none"):
        raise LorakitError(f"--use {first!r}: no --adapter has that name.{did_you_mean(first, [*adapters, 'none'])}")
    model = load_model(options, adapters)
    from lorakit.serving.conversation import Conversation
    from lorakit.serving.engine import ServingEngine

    with contextlib.closing(ServingEngine(model, max_rows=1)) as engine:
        talk = Conversation(model, engine, system=options.system)
        talk.settings = dataclasses.replace(talk.settings, temperature=options.temperature)
        talk.settings.check(model.codec(model.adapter(None)).num_tokens)
        _use(talk, first)
        while (line := _read_line(talk)) is not None:
            if line.strip() in ("/quit", "/exit"):
                break
            try:
                _obey(talk, line.strip()) if line.startswith("/") else _answer(talk, line)
            except LorakitError as problem:
                print(problem, file=sys.stderr)


def _read_line(talk: "Conversation") -> str | None:
    """Return the next line that is not empty; None at the end of the input. Ctrl-C begins the line anew."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, because input() then has a history
    while True:
        try:
            line = input(f"{talk.adapter or 'base'}> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()  # the shell's prompt would follow chat's on its line
            return None
        except KeyboardInterrupt:
            print("\n/quit ends")
            continue
        if line.strip():
            return line


def _answer(talk: "Conversation", text: str) -> None:
    """Print the answer while it comes; Ctrl-C ends it, and the conversation goes on."""
    with contextlib.closing(talk.answer(text)) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" (interrupted)", end="")
    print(flush=True)


def _obey(talk: "Conversation", line: str) -> None:
    """Obey a slash command. Raises LorakitError: no such command, or it cannot be done; nothing has changed."""
    command, _, rest = line[1:].partition(" ")
    if command == "use":
        _use(talk, rest.strip())
    elif command == "clear":
        talk.messages.clear()
    else:
        raise LorakitError(HELP)


def _use(talk: "Conversation", name: str) -> None:
    adapter = None if name in ("none", "base") else name
    form = talk.model.codec(talk.model.adapter(adapter)).form  # or its error
    talk.adapter = adapter
    print("; ".join([f"{adapter or 'the base'} answers", *form.notes()]), flush=True)
