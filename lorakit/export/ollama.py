"""Write an Ollama Modelfile, with the chat template of a base in Go's template language.

Ollama does not run Jinja: it recognises some templates, and takes the bare prompt for all others. So the texts around
messages are measured by rendering the base's own template, and compared with it on longer conversations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lorakit.data.chat_template import render_template, writes_date
from lorakit.errors import BaseModelError
from lorakit.patch.prompting import PromptForm

SYSTEM = "\ue001"
USER = "\ue002"
ANSWER = "\ue003"
NEXT = "\ue004"  # private characters that no template contains
ROLES: Final = {SYSTEM: "system", USER: "user", ANSWER: "assistant", NEXT: "user"}
INSTEAD: Final = "use llama-server --jinja, which runs it, or lorakit serve"
Render = Callable[[Sequence[str]], str]
"""contents of messages, each one of ROLES -> the prompt that the base's template makes of them"""


@dataclass(frozen=True)
class MessageTexts:
    """The texts that a chat template writes around the contents of messages."""

    without_system: str
    """at the beginning, if there is no system prompt"""
    before_system: str
    after_system: str
    before_user: str
    before_answer: str
    """between a user's message and the answer of an earlier turn"""
    after_answer: str
    prompt_end: str
    """between the last message and the answer to come"""

    def prompt(self, contents: Sequence[str]) -> str:
        """Return the prompt of a conversation, as Ollama makes it of ``go_template``."""
        text = "" if contents[0] == SYSTEM else self.without_system
        around = {
            "system": (self.before_system, self.after_system),
            "user": (self.before_user, ""),
            "assistant": (self.before_answer, self.after_answer),
        }
        for content in contents:
            before, after = around[ROLES[content]]
            text += before + content + after
        return text + self.prompt_end


def modelfile(source: str, adapter: str | None, tokenizer: Any, form: PromptForm) -> str:
    """Return a Modelfile: the model (and the adapter) of these paths, prompted as the adapter's rows were.

    Raises:
        BaseModelError: the base's chat template does more than Go's can, such as counting turns.
    """
    lines = [f"FROM {source}", *([f"ADAPTER {adapter}"] if adapter else [])]
    if form.raw or not tokenizer.chat_template:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
        return "\n".join(lines) + "\n"
    if writes_date(tokenizer):
        raise BaseModelError(f"the base's chat template writes today's date, which Ollama's cannot; {INSTEAD}")
    texts = message_texts(renderer(tokenizer))
    lines.append(f'TEMPLATE """{go_template(texts)}"""')
    if form.system is not None:
        lines.append(f'SYSTEM """{_literal(form.system)}"""')
    if tokenizer.eos_token:
        lines.append(f"PARAMETER stop {tokenizer.eos_token}")
    return "\n".join(lines) + "\n"


def renderer(tokenizer: Any) -> Render:
    """Return the function that renders the base's template, without a begin token that llama.cpp adds by itself."""
    begin = tokenizer.bos_token or ""
    adds_begin = bool(begin) and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(contents: Sequence[str]) -> str:
        messages = [{"role": ROLES[content], "content": content} for content in contents]
        text = render_template(tokenizer, messages, prompt=True)
        return text.removeprefix(begin) if adds_begin else text

    return render


def message_texts(render: Render) -> MessageTexts:
    """Measure the texts around messages.

    Raises:
        BaseModelError: no such texts make the prompts of the base's template.
    """
    import jinja2

    try:
        first, prompt_end = _between(render([USER]), USER)
        before_system, system_to_user, _ = _between(render([SYSTEM, USER]), SYSTEM, USER)
        _, before_answer, answer_to_user, _ = _between(render([USER, ANSWER, NEXT]), USER, ANSWER, NEXT)
        common_end = _common_end(first, system_to_user, answer_to_user)
        before_user = common_end[max(0, common_end.find("<")) :]  # not from inside of a token such as <|user|>
        texts = MessageTexts(
            without_system=first.removesuffix(before_user),
            before_system=before_system,
            after_system=system_to_user.removesuffix(before_user),
            before_user=before_user,
            before_answer=before_answer,
            after_answer=answer_to_user.removesuffix(before_user),
            prompt_end=prompt_end,
        )
        conversations = (
            [USER], [SYSTEM, USER], [USER, ANSWER, NEXT], [SYSTEM, USER, ANSWER, NEXT],
            [USER, ANSWER, NEXT, ANSWER, USER], [SYSTEM, USER, ANSWER, NEXT, ANSWER, USER],
        )  # fmt: skip
        if all(texts.prompt(contents) == render(contents) for contents in conversations):
            return texts
    except (jinja2.TemplateError, ValueError, TypeError):
        pass
    raise BaseModelError(
        f"the base's chat template cannot be written for Ollama: it does more than put texts around messages; {INSTEAD}"
    )


def go_template(texts: MessageTexts) -> str:
    """Return the template in Go's language."""
    t = {name: _literal(text) for name, text in vars(texts).items()}
    return (
        f"{{{{ if .System }}}}{t['before_system']}{{{{ .System }}}}{t['after_system']}"
        f"{{{{ else }}}}{t['without_system']}{{{{ end }}}}"
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{t["before_user"]}{{{{ .Content }}}}'
        f'{{{{ else if eq .Role "assistant" }}}}{t["before_answer"]}{{{{ .Content }}}}{t["after_answer"]}'
        f"{{{{ end }}}}{{{{ end }}}}{t['prompt_end']}"
    )


def _between(text: str, *marks: str) -> list[str]:
    """Split a text at the marks, each of which must occur once, in this order."""
    parts = []
    for mark in marks:
        before, marker, text = text.partition(mark)
        if not marker or mark in text:
            raise ValueError(mark)
        parts.append(before)
    return [*parts, text]


def _common_end(*texts: str) -> str:
    shortest = min(texts, key=len)
    return next(
        shortest[start:] for start in range(len(shortest) + 1) if all(t.endswith(shortest[start:]) for t in texts)
    )


def _literal(text: str) -> str:
    """Return a text as it stands in a Go template inside of triple quotes.

    Raises:
        BaseModelError: it cannot stand there.
    """
    if "{{" in text or "}}" in text or '"""' in text:
        raise BaseModelError(f"{text!r} cannot stand in an Ollama Modelfile, because of {{{{, }}}} or triple quotes")
    return text
