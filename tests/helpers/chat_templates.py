"""Real chat templates, a tokenizer for any of them, and conversations of every shape."""

import itertools
import random
import re
from importlib.resources import files
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lorakit.patch.prompting import NAMED_TEMPLATES, read_chat_template

SPECIAL: Final = re.compile(
    r"<[|｜][^<>{}'\s]*[|｜]>|<\|\w+>|<\w+\|>|</?s>|<(?:start|end)_of_(?:turn|image|utterance)>|<sop>|\[/?[A-Z_]+\]|\[gMASK\]"
)
ORDINARY: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""tokens that tokenizers have, and that are not special, so that an answer shows them"""


def trl_templates() -> dict[str, str]:
    """Return the chat templates that TRL ships, by name, without those that it changed for its own training."""
    folder = files("trl").joinpath("chat_templates")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".jinja"))
    return {
        name.removesuffix(".jinja"): folder.joinpath(name).read_text()
        for name in names
        if not name.endswith("_training.jinja")
    }


def named_templates() -> dict[str, str]:
    """Return the chat templates that lorakit has by name."""
    return {name: read_chat_template(name) for name in NAMED_TEMPLATES}


def tokenizer_for(template: str) -> Any:
    """Return a tokenizer of bytes with the tokens that a template writes, and with the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    special = sorted({*SPECIAL.findall(template)} - {"<s>", "</s>"})
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY if text in template])
    tokenizer.chat_template = template
    return tokenizer


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    """Return the description of a tool with one argument."""
    parameters = {
        "type": "object",
        "properties": {"place": {"type": "string", "description": "where to look"}},
        "required": ["place"],
    }
    return {"type": "function", "function": {"name": name, "description": "looks it up", "parameters": parameters}}


ODD: Final = ("", "\u00fc", "a: b", "[INST]x", "`{1}`", "5 < 6 > 2", "x\ny", "  z  ")
"""texts that some templates or tokenizers treat in their own way"""
SYSTEM: Final = {"role": "system", "content": "Be systematic."}
TOOLS: Final = [tool("weather_of"), tool("time_of")]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def _tool(text: str, name: str = "weather_of", number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": name, "tool_call_id": f"call{number:05}"}


def conversations() -> dict[str, dict[str, Any]]:
    """Return rows of every shape by name. Each text is found in one message alone."""
    one, two = _user("question alpha"), _user("question beta")
    first, second = _assistant("answer gamma"), _assistant("answer delta")
    calls = {"tool_calls": [call("weather_of", {"place": "Oslo"})]}
    as_text = {"tool_calls": [call("weather_of", '{"place": "Oslo"}')]}
    twice = {"tool_calls": [call("weather_of", {"place": "Oslo"}), call("time_of", {"place": "Bergen"}, 2)]}
    thought = "<think>\nthinking epsilon\n</think>\n\nanswer gamma"
    return {
        "one turn": {"messages": [one, first]},
        "two turns": {"messages": [one, first, two, second]},
        "three turns": {"messages": [one, first, two, second, _user("question zeta"), _assistant("answer eta")]},
        "system": {"messages": [SYSTEM, one, first]},
        "system, two turns": {"messages": [SYSTEM, one, first, two, second]},
        "assistant first": {"messages": [first, two, second]},
        "user twice": {"messages": [one, two, second]},
        "assistant twice": {"messages": [one, first, second]},
        "user last": {"messages": [one, first, two]},
        "first not trained": {"messages": [one, {**first, "weight": 0}, two, second]},
        "last not trained": {"messages": [one, first, two, {**second, "weight": 0}]},
        "thinking in content": {"messages": [one, _assistant(thought)]},
        "thinking in content, two turns": {"messages": [one, _assistant(thought), two, second]},
        "thinking in a field": {"messages": [one, {**first, "reasoning_content": "thinking epsilon"}]},
        "thinking in fields, two turns": {
            "messages": [
                one,
                {**first, "reasoning_content": "thinking epsilon"},
                two,
                {**second, "reasoning_content": "thinking iota"},
            ]
        },
        "call": {"messages": [one, _assistant("", **calls)], "tools": TOOLS},
        "call as text": {"messages": [one, _assistant("", **as_text)], "tools": TOOLS},
        "call without tools": {"messages": [one, _assistant("", **calls)]},
        "call and answer": {"messages": [one, _assistant("", **calls), _tool("result theta"), first], "tools": TOOLS},
        "content and call": {
            "messages": [one, _assistant("words kappa", **calls), _tool("result theta"), first],
            "tools": TOOLS,
        },
        "two calls": {
            "messages": [one, _assistant("", **twice), _tool("result theta"), _tool("result mu", "time_of", 2), first],
            "tools": TOOLS,
        },
        "chain of calls": {
            "messages": [
                one,
                _assistant("", **calls),
                _tool("result theta"),
                _assistant("", tool_calls=[call("time_of", {"place": "Bergen"}, 2)]),
                _tool("result mu", "time_of", 2),
                first,
            ],
            "tools": TOOLS,
        },
        "call in a later turn": {
            "messages": [SYSTEM, one, first, two, _assistant("", **calls), _tool("result theta"), second],
            "tools": TOOLS,
        },
        "call without arguments": {
            "messages": [one, _assistant("", tool_calls=[call("weather_of", {})])],
            "tools": TOOLS,
        },
        "call with thinking": {
            "messages": [one, _assistant("", reasoning_content="thinking epsilon", **calls), _tool("result theta"), first],
            "tools": TOOLS,
        },
        "empty calls": {"messages": [one, {**first, "tool_calls": []}], "tools": TOOLS},
        "tools unused": {"messages": [one, first], "tools": TOOLS},
        "blank answer": {"messages": [one, _assistant(" ")]},
        "empty user": {"messages": [_user(""), first]},
        "odd content": {"messages": [one, _assistant('answer "gamma"\n```json\n{"a": [1]}\n```\n\u00e9\u4e2d\U0001f600')]},
        "spaces around": {"messages": [one, _assistant("  answer gamma \n\n"), two, second]},
        "like a header": {"messages": [one, _assistant("user: answer gamma\nassistant: yes"), two, second]},
        "same texts": {"messages": [one, first, one, first]},
        "developer": {"messages": [{"role": "developer", "content": "Be systematic."}, one, first]},
        "prompt and completion": {"prompt": [SYSTEM, one, first, two], "completion": [second]},
    }  # fmt: skip


def drawn_conversation(seed: int) -> dict[str, Any]:
    """Return a row of one to three turns with any of calls, thinking and odd texts; each text is in one message."""
    rng = random.Random(seed)
    numbers = itertools.count()

    def text(kind: str) -> str:
        return f"{kind} {rng.choice(ODD)} {seed}n{next(numbers)}e"

    def thought() -> dict[str, str]:
        return {"reasoning_content": text("thinking")} if rng.random() < 0.3 else {}

    tools = TOOLS if rng.random() < 0.4 else None
    messages = [{"role": "system", "content": text("system")}] if rng.random() < 0.3 else []
    messages += [_assistant(text("greeting"))] if rng.random() < 0.1 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(_user(text("question")))
        for _ in range(rng.choice([0, 1, 2]) if tools or rng.random() < 0.2 else 0):
            names = rng.sample(["weather_of", "time_of"], rng.choice([1, 1, 2]))
            calls = [call(name, {"place": text("place")}, number) for number, name in enumerate(names, 1)]
            words = text("words") if rng.random() < 0.3 else ""
            messages.append(_assistant(words, tool_calls=calls, **thought()))
            messages += [_tool(text("result"), name, number) for number, name in enumerate(names, 1)]
        answer = _assistant(text("answer"), **thought())
        if rng.random() < 0.1:
            answer["content"] = f"<think>\n{text('thinking')}\n</think>\n\n{answer['content']}"
        messages.append(answer | rng.choice([{}, {}, {}, {"weight": 0}, {"tool_calls": []}]))
    messages += [_user(text("question"))] if rng.random() < 0.1 else []
    return {"messages": messages} | ({"tools": tools} if tools else {})
