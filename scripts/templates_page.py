"""Write docs/chat-templates.md, what is trained with each of TRL's templates: ``python -m scripts.templates_page``.

Labels are compared with the marks of TRL's own training templates, answer by answer.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lorakit.data.chat_template import TEMPLATE_FAILURES
from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Chat, Encoded, to_conversation
from lorakit.data.row_settings import RowSettings
from tests.helpers.chat_templates import conversations, tokenizer_for, trl_templates

PAGE: Final = Path(__file__).parents[1] / "docs" / "chat-templates.md"
SAME: Final = "same"
REASONS: Final = {
    "prompt": "TRL also trains the end of the prompt, such as `<|start|>assistant`",
    "thought": "the prompt opens a thought that TRL's row does not have; lorakit's label closes it",
    "thinking": "lorakit's row has the answer's thinking, or its words before a call, and TRL's row leaves them out",
    "end": "another end token: lorakit's is the one after which the model is asked no further",
    "arguments": "TRL's template quotes arguments that are JSON text once more",
    "joined": "TRL's marks of neighbouring answers join, or do not fit the tokens",
}
THINKING: Final = re.compile(
    r"<think>.*?</think>|<\|channel>thought.*?<channel\|>|<\|channel\|>analysis.*?<\|end\|>", re.DOTALL
)


def answers_of(ids: Sequence[int], is_label: Sequence[bool], tokenizer: Any) -> list[tuple[str, str]]:
    """Return (text before it, text) of each run of labels."""
    runs = itertools.groupby(range(len(ids)), lambda index: bool(is_label[index]))
    labels = [list(run) for is_on, run in runs if is_on]
    return [(tokenizer.decode(ids[: run[0]]), tokenizer.decode([ids[i] for i in run])) for run in labels]


def reasons_of(prompt: str, ours: str, marked: str, tokenizer: Any) -> list[str]:
    """Return why labels differ from TRL's: keys of REASONS. Raises ValueError: for another reason."""
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    reasons = []
    if marked.strip() != ours.strip():
        asked = (prompt.rstrip(), prompt.rstrip().removesuffix("<think>"))
        sizes = [
            size for size in range(1, len(marked)) if any(p.endswith(marked[:size].strip() or "\0") for p in asked)
        ]
        reasons += ["prompt"] if sizes else []
        marked = marked[max(sizes, default=0) :]
    end = re.compile(f"(\\s*({'|'.join(map(re.escape, tokens))}))*\\s*$")
    ends = ["".join(found[0].split()) for text in (ours, marked) if (found := end.search(text))]
    reasons += ["end"] if ends[0] != ends[1] else []
    texts = [end.sub("", text).strip() for text in (ours, marked)]
    if "</think>" in texts[0] and "<think>" not in texts[0]:
        reasons.append("thought")
        texts = [re.sub(r"^.*</think>", "", text, flags=re.DOTALL) for text in texts]
    if texts[0].strip() != texts[1].strip() and '\\"' in texts[1]:
        reasons.append("arguments")
        texts[1] = texts[1].replace('"{', "{").replace('}"', "}").replace('\\"', '"')
    bare = ["".join(re.sub("|".join(map(re.escape, tokens)), "", THINKING.sub("", text)).split()) for text in texts]
    if texts[0].strip() != texts[1].strip() and bare[0].endswith(bare[1].removeprefix("assistant")):
        reasons.append("thinking")
    elif texts[0].strip() != texts[1].strip():
        raise ValueError(f"{ours!r} and {marked!r}")
    return reasons or [SAME]


def marks_of(name: str, template: str) -> Any:
    """Return a tokenizer with TRL's template that marks answers; None: TRL has none."""
    file = files("trl").joinpath("chat_templates", f"{name}_training.jinja")
    text = template if "generation %}" in template else file.read_text() if file.is_file() else None
    return None if text is None else tokenizer_for(text)


def _by_turn(answer: tuple[str, str]) -> int:
    return len(answer[0])  # the prompt of a later answer is longer


def compared(rows: Sequence[Encoded], row: dict[str, Any], tokenizer: Any, trl: Any) -> Counter[str]:
    """Return the answers of a conversation by how their labels differ from TRL's."""
    chat = to_conversation(row)
    assert isinstance(chat, Chat)
    try:
        marked = trl.apply_chat_template(
            list(chat.messages), tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except TEMPLATE_FAILURES:
        return Counter()
    ours = sorted((answer for one in rows for answer in answers_of(one.ids, one.label_mask, tokenizer)), key=_by_turn)
    theirs = answers_of(marked["input_ids"], marked["assistant_masks"], trl)
    if len(ours) != len(theirs):
        return Counter({"joined": len(ours)})
    pairs = zip(ours, theirs, strict=True)
    return Counter(key for (prompt, text), (_, mark) in pairs for key in reasons_of(prompt, text, mark, tokenizer))


def page() -> str:
    """Return the text of docs/chat-templates.md."""
    lines = []
    total = Counter[str]()
    for name, template in trl_templates().items():
        tokenizer = tokenizer_for(template)
        trl = marks_of(name, template)
        encode = Encoder(tokenizer, RowSettings())
        counts = Counter[str]()
        marks = Counter[str]()
        for row in conversations().values():
            try:
                rows = encode(row)
            except BadRow:
                counts["refused"] += 1
                continue
            counts["one row" if len(rows) == 1 else "several rows"] += 1
            if trl is not None and "weight" not in str(row):  # which TRL does not read
                marks += compared(rows, row, tokenizer, trl)
        total += counts
        found = ", ".join(f"{key} {number}" for key, number in sorted(marks.items())) or "-"
        lines.append(f"| {name} | {counts['one row']} | {counts['several rows']} | {counts['refused']} | {found} |")
    trained = total["one row"] + total["several rows"]
    text = f"""\
# Chat templates

Written by `python -m scripts.templates_page`. Each of the chat templates of TRL 1.16 renders {len(conversations())}
conversations: several turns, system prompts, tools, calls, chains of calls, thinking, and odd texts.
`tests/data/test_labels.py` holds for each of them: no text of another message is a label, every trained answer is,
each ends with an end token, and the tokens before it are those of its prompt in use; or the row is refused with the
reason. Of {sum(total.values()):,} pairs {trained:,} are trained, {total["several rows"]} of them in several rows, and
{total["refused"]} are refused, most of them because the template leaves out tools, calls or thinking, or wants user
and assistant to take turns.

Templates of models for pictures (idefics3, llava_next, smolvlm) show nothing of a content that is a text: they get
it as a list of one part.

The last column counts answers by how lorakit's labels differ from the marks of TRL's training template, white space
at their ends aside; `-`: TRL has no marks for it, or all conversations are refused.

"""
    reasons = [f"- `{key}`: {reason}." for key, reason in REASONS.items()]
    head = ["", "| template | one row | several rows | refused | labels beside TRL's marks |", "|---|---|---|---|---|"]
    return text + "\n".join([*reasons, *head, *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
