"""Write the table of a chat's fields by chat template in docs/serving.md: ``python -m scripts.template_fields``.

Every cell is a request that the server's own code renders.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorakit.errors import LorakitError
from lorakit.inference.call_grammar import call_grammar
from lorakit.inference.prompts import PromptCodec
from lorakit.serving.completion_routes import chat_ids
from lorakit.serving.requests import ChatRequest
from tests.helpers.chat_templates import call, named_templates, tokenizer_for, tool, trl_templates

PAGE: Final = Path(__file__).parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->"
TEXT: Final = "zebra"  # that is in no template
USER: Final[dict[str, Any]] = {"role": "user", "content": "hi"}
ANSWER: Final = {"role": "assistant", "content": "yes"}
CALL: Final = {"role": "assistant", "content": "", "tool_calls": [call("look", json.dumps({"place": TEXT}))]}
RESULT: Final = {"role": "tool", "content": TEXT, "tool_call_id": "call00001", "name": "look"}
ASKED: Final = {**CALL, "tool_calls": [call("look", '{"place": "Oslo"}')]}
TOOLS: Final = {"tools": [tool(TEXT)]}
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "`system`": {"messages": [{"role": "system", "content": TEXT}, USER]},
    "`developer`": {"messages": [{"role": "developer", "content": TEXT}, USER]},
    "another role": {"messages": [USER, {"role": "critic", "content": TEXT}]},
    "`name`": {"messages": [{**USER, "name": TEXT}]},
    "unknown field": {"messages": [{**USER, "mood": TEXT}]},
    "`tools`": {"messages": [USER], **TOOLS},
    "`tool_calls`": {"messages": [USER, CALL, RESULT], **TOOLS},
    "`tool` result": {"messages": [USER, ASKED, RESULT], **TOOLS},
    "`reasoning_content`": {"messages": [USER, {**ANSWER, "reasoning_content": TEXT}, USER]},
    "`enable_thinking`": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "`reasoning_effort`": {"messages": [USER], "reasoning_effort": "low"},
    "`tool_choice`": {"messages": [USER], **TOOLS, "tool_choice": "required"},
}
"""column -> the request that has the field"""
TAKEN: Final = {"`enable_thinking`", "`reasoning_effort`"}  # they are no text


def outcome(codec: PromptCodec, column: str) -> str:
    """Return `shown`, `as system` or `left out`, or `refused`."""
    chat = ChatRequest.model_validate({"model": "base", **FIELDS[column]})
    try:
        ids = chat_ids(codec, chat)
        text = str(codec.tokenizer.decode(ids))
        if chat.forced_tools:
            call_grammar(codec.answer_form, codec.tokenizer, chat.forced_tools, text, parallel=True)
    except LorakitError:
        return "refused"
    if column == "`developer`" and outcome(codec, "`system`") == "shown":
        as_system = ChatRequest.model_validate({"model": "base", **FIELDS["`system`"]})
        if chat_ids(codec, as_system) == ids:
            return "as system"
    return "shown" if column in TAKEN or TEXT in text else "left out"


def table() -> str:
    with torch.device("meta"):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512))
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, template in sorted({**named_templates(), **trl_templates()}.items()):
        plain = {"model": "base", "messages": [{**USER, "content": TEXT}]}
        codec = PromptCodec(model, tokenizer_for(template))
        chat_ids(codec, ChatRequest.model_validate(plain))
        rows[tuple(outcome(codec, column) for column in FIELDS)].append(name)
    lines = [f"| template | {' | '.join(FIELDS)} |", f"|---{'|---' * len(FIELDS)}|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of docs/serving.md with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
