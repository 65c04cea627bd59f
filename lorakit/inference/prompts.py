"""Encode prompts into tokens and decode tokens into answers, for one base and its tokenizer, if it has one."""

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, Final, final

from torch import nn

from lorakit.base._internals import backend_of
from lorakit.base.layers import num_positions
from lorakit.base.transformers_io import check_recorded, vocabulary_size
from lorakit.data.chat_template import (
    NO_KWARGS,
    TEMPLATE_FAILURES,
    ChatTemplate,
    check_template_kwargs,
    end_marker,
    render_template,
)
from lorakit.data.encode import head_row, num_extra_begins, separates_texts
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import Chat
from lorakit.data.shown import check_prompt, unshown_keys
from lorakit.decoding.grammar import GrammarCompiler
from lorakit.errors import ContextLengthError, DataError, LorakitError, PatchError, TargetError, translate_error
from lorakit.inference.answer_form import AnswerForm, find_answer_form
from lorakit.ops.encoder_head import is_encoder
from lorakit.patch import Patch
from lorakit.patch.own_head import OwnHead, own_head
from lorakit.patch.pooling import Pooling
from lorakit.patch.prompting import CHAT, PromptForm, trained_form

NO_TOKENIZER: Final = "this base has no tokenizer; name the folder of one (--tokenizer, lorakit.load(tokenizer=...))"
Prompt = str | list[dict[str, Any]] | list[int] | tuple[str, str]
"""a text, messages, token ids; or for a head, two texts"""
REPLACEMENT: Final = "\ufffd"  # stands for bytes that are no character
FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's token of one byte
VISIBLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN: Final = [byte for byte in range(256) if byte not in VISIBLE]
BYTES: Final = {chr(byte): byte for byte in VISIBLE} | {chr(256 + number): byte for number, byte in enumerate(HIDDEN)}
"""character of a byte-level token -> the byte for which it stands, as GPT-2's tokenizer has them"""
NUM_BEFORE: Final = 4  # tokens, of which one has more than a part of a character


def end_token_ids(tokenizer: Any, own: int | list[int] | None, *, raw: bool = False) -> list[int]:
    """Return every token that ends an answer: the model's ``own``, then the tokenizer's, and the chat template's.

    ``raw``: answers are plain text, without the chat template. Raises DataError: the template fails.
    """
    ends = [*(own if isinstance(own, list) else [own])]
    if tokenizer is not None:
        ends.append(tokenizer.eos_token_id)
        if tokenizer.chat_template and not raw and (marker := end_marker(tokenizer)):
            ends.append(tokenizer.convert_tokens_to_ids(marker))
    return [token for token in dict.fromkeys(ends) if token is not None]


class PromptCodec:
    """Chat template, position limit and end tokens of a base, or of an adapter.

    ``form``: of the rows in training: of an adapter, or of a merged model. ``kwargs``: variables of the chat template
    that are requested, which come before those of any form.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, form: PromptForm = CHAT, kwargs: Mapping[str, Any] = NO_KWARGS
    ) -> None:
        check_template_kwargs(tokenizer, kwargs, "chat_template_kwargs")
        self.tokenizer = tokenizer
        self.head: OwnHead | None = None  # of an adapter, instead of answers
        self.pooling: Pooling | None = None  # of an adapter's embeddings, instead of answers
        self._requested_kwargs = kwargs
        self.form = form
        self.template_kwargs = {**form.template_kwargs, **kwargs}  # variables for the chat template
        self.limit = num_positions(model.config) or math.inf  # tokens of the longest prompt with its answer
        self.is_encoder = is_encoder(model)
        own: Any = None if self.is_encoder else model.generation_config.eos_token_id  # type: ignore[union-attr]
        self.end_ids = [] if self.is_encoder else sorted(end_token_ids(tokenizer, own))  # tokens that end an answer
        self.num_tokens = vocabulary_size(model)
        self.grammars = GrammarCompiler(tokenizer, self.num_tokens, self.end_ids)

    @cached_property
    def answer_form(self) -> AnswerForm:
        """How the chat template writes thinking and tool calls."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            return AnswerForm()
        return find_answer_form(ChatTemplate(self.tokenizer, kwargs=self.template_kwargs))

    def of_patch(self, patch: Patch) -> "PromptCodec":
        """Return this codec, or one with a patch's form and new tokens. Raises PatchError: their ids differ."""
        form = trained_form(patch.metadata)
        head = own_head(patch)
        if head is not None and not patch.metadata:  # texts go into a classifier of another program as they are
            form = PromptForm(raw=True)
        if not patch.new_tokens and form == self.form and head is None and patch.pooling is None:
            return self
        other = copy.copy(self)
        other.form = form
        other.head = head
        other.pooling = patch.pooling
        other.template_kwargs = {**form.template_kwargs, **self._requested_kwargs}
        other.__dict__.pop("answer_form", None)  # of this one's template kwargs
        if patch.new_tokens:
            other.num_tokens = self.num_tokens + patch.num_added_rows(self.num_tokens)
            if self.tokenizer is not None:
                other.tokenizer = copy.deepcopy(self.tokenizer)
                with translate_error(TargetError, PatchError, f"{patch.folder}"):
                    check_recorded(other.tokenizer, patch.new_tokens)
            other.end_ids = sorted(end_token_ids(other.tokenizer, self.end_ids))
            other.grammars = GrammarCompiler(other.tokenizer, other.num_tokens, other.end_ids)
        return other

    def check_answers(self) -> None:
        """Raise LorakitError if no prompts are answered: by an encoder, a head of the adapter's own, or embeddings."""
        if self.is_encoder:
            raise LorakitError("model: this base has no head that predicts tokens; it embeds (embed, /v1/embeddings)")
        if self.pooling is not None:
            raise LorakitError("model: this adapter answers no prompts, it embeds (embed, /v1/embeddings)")
        if self.head is not None:
            does = "classifies (classify, /classify)" if self.head.labels else "gives a number (reward, /pooling)"
            raise LorakitError(f"model: this adapter answers no prompts, it {does}")

    def check_ids(self, ids: list[int], max_new_tokens: int) -> None:
        """Raise LorakitError unless the base has these tokens, and positions for them and ``max_new_tokens`` more."""
        if not ids:
            raise LorakitError("prompts: one has no tokens; at least 1 is needed")
        if len(ids) + max_new_tokens > self.limit:
            left = self.limit - len(ids)
            remedy = f"request up to {left} (max_new_tokens)" if left > 0 else "shorten the prompt"
            given = f"{len(ids)} tokens and {max_new_tokens} new ones"
            raise ContextLengthError(f"prompts: {given}, and at most {self.limit} fit this base; {remedy}")
        if outside := [token for token in ids if not 0 <= token < self.num_tokens]:
            raise LorakitError(f"prompts: the token id {outside[0]}, and the base has {self.num_tokens} tokens")

    def special_ids(self, stops: Sequence[str]) -> list[int]:
        """Return the special tokens among texts that end an answer. Raises LorakitError: one has more text too."""
        if not stops or self.tokenizer is None:
            return []
        ids = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        for stop in stops:
            if stop not in ids and (inside := [token for token in ids if token in stop]):
                raise LorakitError(f"stop: {stop!r} has special token {inside[0]!r}, which no text has; give it alone")
        return [ids[stop] for stop in stops if stop in ids]

    def shown_ids(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, kwargs: Mapping[str, Any], *, prompt: bool
    ) -> list[int]:
        """Return the token ids of messages, and of an answer's beginning if ``prompt``. kwargs: before the codec's.

        Raises LorakitError: the chat template does not show every part of it, or it cannot be encoded.
        """
        try:
            template = ChatTemplate(self.tokenizer, kwargs={**self.template_kwargs, **kwargs})
            row = Chat(tuple(messages), tools, (False,) * len(messages))
            text = template.render(messages, tools, prompt=prompt)
            check_prompt(template, row, text)
            unshown = unshown_keys(template, row)
            ids = encode(self.tokenizer, text)
        except (DataError, *TEMPLATE_FAILURES) as problem:  # BadRow among them, without its remedy for rows
            raise LorakitError(f"messages: {str(problem).partition(' (data.')[0]}") from None
        if "name" in unshown and any(message.get("name") for message in messages if message["role"] != "tool"):
            raise LorakitError("messages: the chat template leaves out name; write it into the content")
        return ids

    def row_ids(self, row: Prompt) -> list[int]:
        """Return the token ids of a row for a head: a text, two, messages with answers, or ids. Raises LorakitError."""
        if isinstance(row, tuple) and (len(row) != 2 or not all(isinstance(one, str) and one for one in row)):
            raise LorakitError(f"a tuple is of two texts, a question and what answers it; got {str(row)[:60]}")
        has_template = self.tokenizer is not None and self.tokenizer.chat_template
        if isinstance(row, tuple) and has_template and not self.form.raw:  # of conversations in training
            row = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), row, strict=True)]
        is_messages = isinstance(row, list) and row and isinstance(row[0], dict)
        if has_template and (is_messages or (isinstance(row, str) and not self.form.raw)):
            ids = self.shown_ids(_messages(row, self.form), None, {}, prompt=False)
        elif isinstance(row, str | tuple) and self.tokenizer is not None:
            question, text = ("", row) if isinstance(row, str) else row
            if not separates_texts(self.tokenizer):
                ids = encode(self.tokenizer, question + text, add_special_tokens=True)
            else:
                try:
                    ids, _ = head_row(self.tokenizer, question, text)
                except BadRow as problem:
                    raise LorakitError(f"prompts: a text {problem}") from None
        else:
            ids = self.token_ids(row, self.form)
        self.check_ids(ids, 0)
        return ids

    def text_ids(self, text: Any, pooling: Pooling) -> list[int]:
        """Return a text's token ids to embed, special ones too: the end may be pooled. Raises LorakitError."""
        if isinstance(text, str) and self.tokenizer is not None:
            ids = encode(self.tokenizer, text, add_special_tokens=True)
        elif isinstance(text, list) and all(type(token) is int for token in text):
            ids = text
        else:
            why = f"{NO_TOKENIZER}, or give token ids" if isinstance(text, str) else "give a text or token ids"
            raise LorakitError(f"prompts: {why}; got {str(text)[:60]!r}")
        limit = min(self.limit, pooling.max_tokens or math.inf)
        if len(ids) > limit:
            raise ContextLengthError(f"prompts: a text of {len(ids)} tokens; from 1 to {limit} can be embedded")
        self.check_ids(ids, 0)
        return ids

    def decode(self, ids: list[int], prompt: Sequence[int] = ()) -> str:
        """Decode an answer up to its first end token, as the text goes on after a prompt."""
        before = tokens_before(self.tokenizer, prompt)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        return str(decode([*before, *self.until_end(ids)]))[len(decode(before)) :]

    def until_end(self, ids: list[int]) -> list[int]:
        return ids[: next((index for index, token in enumerate(ids) if token in self.end_ids), len(ids))]

    def token_ids(
        self,
        prompt: Prompt,
        form: PromptForm,
        tools: list[Any] | None = None,
        *,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> list[int]:
        """Return the token ids of a prompt in its form, or raise LorakitError. template_kwargs: before the codec's."""
        if not isinstance(prompt, str | list):
            raise LorakitError(f"prompt {prompt!r}: a text, a list of messages, or a list of token ids")
        try:
            is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
            if self.tokenizer is None and not is_ids:
                raise LorakitError(f"prompts: {NO_TOKENIZER}, or give token ids; got {str(prompt)[:60]!r}")
            is_text = isinstance(prompt, str) and (form.raw or not self.tokenizer.chat_template)
            if tools and (is_ids or is_text):
                raise LorakitError("tools: a chat template shows them, and this prompt is given without one")
            if is_ids:
                return list(prompt)  # type: ignore[arg-type]
            if is_text:
                return self._plain_ids(prompt)  # type: ignore[arg-type]
            messages = _messages(prompt, form)
            check_template_kwargs(self.tokenizer, template_kwargs, "chat_template_kwargs")
            kwargs = {**self.template_kwargs, **template_kwargs}
            render = partial(render_template, self.tokenizer, messages, prompt=True, kwargs=kwargs)
            text = render(tools)
            if tools and text == render():
                raise LorakitError("tools: the chat template leaves them out")
            return encode(self.tokenizer, text)
        except TEMPLATE_FAILURES as problem:
            raise LorakitError(f"prompts: one cannot be encoded: {problem}; got {str(prompt)[:60]!r}") from None

    def _plain_ids(self, text: str) -> list[int]:
        """Return the tokens of a text with one begin token, without the end token that some tokenizers append."""
        ids = encode(self.tokenizer, text, add_special_tokens=True)
        ids = ids[num_extra_begins(self.tokenizer, ids) :]
        end = self.tokenizer.eos_token_id
        end_text = self.tokenizer.eos_token
        return ids[:-1] if end is not None and ids[-1:] == [end] and not text.endswith(end_text) else ids


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a text, as a call of its tokenizer does.

    Where it can, without the offsets that a call computes: they take half of the time, and freeing them keeps the other
    threads of Python waiting, for 20 ms after a text of 1 MB.
    """
    backend = backend_of(tokenizer)
    if backend is None:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def tokens_before(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, after which the answer is decoded; none if the text begins with the answer.

    Alone, an answer would lose the space before its first word with sentencepiece. Special tokens are no text.
    """
    special = frozenset(tokenizer.all_special_ids)
    ids = list(itertools.islice((token for token in reversed(prompt) if token not in special), NUM_BEFORE))[::-1]
    return [] if str(tokenizer.decode(ids, skip_special_tokens=False)).endswith(REPLACEMENT) else ids


@final
class TokenTexts:
    """The texts of tokens, decoded after another one, because some tokenizers drop the first space of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self.text = cache(self._text)
        self.bytes = cache(self._bytes)

    def _text(self, token: int) -> str:
        if self._before is None or token in self._special:
            return str(self._tokenizer.decode([token]))
        before = self._tokenizer.decode([self._before])
        return str(self._tokenizer.decode([self._before, token])).removeprefix(before)

    def _bytes(self, token: int) -> bytes:
        text = self.text(token)
        if REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if match := FALLBACK.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        return text.encode()

    @cached_property
    def _before(self) -> int | None:
        """Return a token of plain text, after which others are decoded; None: there is none."""
        ids = [one for one in self._tokenizer("a", add_special_tokens=False)["input_ids"] if one not in self._special]
        is_plain = bool(ids) and str(self._tokenizer.decode(ids[-1:])).isascii()
        return ids[-1] if is_plain else None


def _messages(prompt: Any, form: PromptForm) -> list[dict[str, Any]]:
    """Return the messages of a prompt: a text is a user's, after the system prompt of the form."""
    system = [] if form.system is None else [{"role": "system", "content": form.system}]
    return [*system, {"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
