"""Turn a row of a file into rows of token ids and label masks: a mask says which tokens carry the loss.

    row          {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    text         <|user|>hi<|end|><|assistant|>yes<|end|>        rendered by the chat template (chat_template.py)
    spans                                      yes<|end|>        characters of every answer with its end token
    ids          <|user|> hi <|end|> <|assistant|> yes <|end|>   tokens of the text
    label_mask   False  False False  False        True True      True for the tokens of a span

A row of plain text has no template: its span is the completion, and the tokenizer's end token is appended. Token ids
are taken as they are.

Invariant: every answer token and its end token is a label, and no prompt token is. With ``loss_on: all`` every token of
the text is a label. A row for a head of the adapter's own is its whole text, and one token more: the number of its
class, which the head predicts at the text's last token, and which no token of the row attends to. So is a text that is
embedded; the labels are the tokens after those that are pooled.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

import numpy as np

from lorakit.data.chat_template import Answer, ChatTemplate
from lorakit.data.head_labels import verdict, without_key
from lorakit.data.pairs import to_pair, to_texts
from lorakit.data.row_files import BadRow, LongRow
from lorakit.data.row_formats import Chat, Encoded, Text, to_conversation
from lorakit.data.row_settings import RowSettings
from lorakit.data.shown import check_answer, check_prompt, shown_answers, unshown_keys
from lorakit.errors import DataError

MAX_MESSAGES: Final = 1000  # of a conversation of fewer tokens
Span = tuple[int, int]  # (start, stop): a range of characters


@final
class Encoder:
    """Encodes rows with one tokenizer."""

    def __init__(self, tokenizer: Any, settings: RowSettings) -> None:
        if not tokenizer.is_fast:
            raise DataError("the tokenizer gives no character offsets; a tokenizer.json is needed to find the labels")
        if tokenizer.eos_token_id is None and settings.labels is None:  # a row for a head gets none
            raise DataError("the tokenizer has no end token (eos_token); set one in its tokenizer_config.json")
        self._tokenizer = tokenizer
        self._settings = settings
        self._has_head = settings.labels is not None
        self._head_labels = settings.head_labels
        self._labels_all = settings.loss_on == "all" or self._has_head
        self._added_ids = list(tokenizer.added_tokens_decoder)
        self._template = ChatTemplate(tokenizer, settings.today, settings.template_kwargs)

    def __call__(self, row: Any) -> list[Encoded]:
        """Return the rows of tokens and label masks that a row becomes.

        One, several of a conversation's answers, the chosen and the rejected answer of a pair, or an anchor, its
        positive and its negatives.
        Raises BadRow: an unknown row format, a template that refuses or hides part of the row, or no label.
        """
        if isinstance(row, BadRow):  # which could not be read, or whose columns lack a key
            raise row
        if self._head_labels is not None:
            content, label = without_key(row, "label")
            return self._encode(content, self._head_labels.number(label))
        if self._settings.verdicts:
            key = "kto_tag" if isinstance(row, Mapping) and row.get("kto_tag") is not None else "label"
            content, label = without_key(row, key)
            return self._encode_verdict(content, verdict(label, key))
        if self._settings.texts:
            texts = to_texts(row, self._settings.texts - 2, self._settings.ignore_keys)
            return [self._pooled(one) for text in texts for one in self._encode(text)]
        if not self._settings.pairs:
            return self._encode(row)
        both = [self._encode(one) for one in to_pair(row, self._settings.ignore_keys)]
        if any(len(one) != 1 for one in both):
            raise BadRow("an answer has several turns that the chat template shows in several rows; data.turns: last")
        (chosen,), (rejected,) = both
        prompts = [one.ids[: one.label_mask.index(True)] for one in (chosen, rejected)]
        if prompts[0] != prompts[1] and not self._has_head:
            shown = " and ".join(repr(self._tokenizer.decode(prompt)[-60:]) for prompt in prompts)
            raise BadRow(f"the chosen and the rejected answer follow different prompts, {shown}")
        return [chosen, rejected]

    def _pooled(self, text: Encoded) -> Encoded:
        """Make labels of the tokens whose hidden states the text's embedding is of: the tokens after them."""
        num_labels = {"mean": len(text.ids) - 1, "cls": 1}.get(str(self._settings.pooling))
        if num_labels is None:
            return text
        return replace(text, label_mask=[0 < index <= num_labels for index in range(len(text.ids))])

    def _encode_verdict(self, row: Any, sign: int) -> list[Encoded]:
        encoded = self._encode(row)
        if len(encoded) != 1:
            raise BadRow("has several turns that the chat template shows in several rows; data.turns: last")
        if encoded[0].is_text or encoded[0].label_mask[0]:
            raise BadRow("has no prompt, and objective kto compares answers to it")
        return [replace(encoded[0], weight=sign * encoded[0].weight)]

    def _encode(self, row: Any, number: int = 0) -> list[Encoded]:
        """Return the rows of a row with one answer to each question. number: of its class. Raises BadRow."""
        parsed = to_conversation(row, self._settings.ignore_keys)
        most = max(MAX_MESSAGES, self._settings.max_tokens)
        if isinstance(parsed, Chat) and (num_messages := len(parsed.messages)) > most:  # each answer is rendered alone
            raise LongRow(f"has {num_messages:,} messages, and {most:,} are read; cut it, or raise data.max_tokens")
        rows = self._encode_chat(parsed) if isinstance(parsed, Chat) else [self._encode_text(parsed)]
        if self._has_head:
            rows = [self._with_number(one, number) for one in rows]
        if not all(any(one.label_mask[1:]) for one in rows):  # no token predicts the first one
            raise BadRow("has nothing to learn: no assistant or completion token")
        first = parsed.messages[0] if isinstance(parsed, Chat) else {}
        system = str(first["content"]) if first.get("role") == "system" else None
        return [
            replace(
                one,
                unread=parsed.unread | one.unread,
                notes=parsed.notes,
                plain=isinstance(parsed, Text),
                is_text=isinstance(parsed, Text) and not parsed.prompt and not self._has_head,
                system=system,
                weight=parsed.weight,
            )
            for one in rows
        ]

    def _with_number(self, row: Encoded, number: int) -> Encoded:
        """Append the number of a row's class, which is its only label."""
        keeps = self._settings.texts > 0 or self._head_labels is not None
        label_mask = [False] * len(row.ids) + [True]
        return replace(row, ids=[*row.ids, number], label_mask=label_mask, tail=row.tail + 1 if keeps else 0)

    def _encode_text(self, row: Text | Encoded) -> Encoded:
        if isinstance(row, Encoded) and self._has_head and row.token_weights is not None:
            raise BadRow("weights: of tokens; a row with a label or a reward has one `weight`")
        if isinstance(row, Encoded):
            return self._encode_tokens(row)
        text = row.prompt + row.completion
        if self._has_head:
            ids, num_ends = head_row(self._tokenizer, row.prompt, row.completion)
            separator = self._tokenizer.sep_token_id
            # the number of the label is one token more
            if row.prompt and separator in ids and ids.index(separator) + num_ends + 2 >= self._settings.max_tokens:
                raise LongRow("its prompt leaves no room for its completion in data.max_tokens")
            return Encoded(ids, [], tail=num_ends)
        start = 0 if self._labels_all else len(row.prompt)
        encoded = self._tokenize(text, [(start, len(text))], [], add_special_tokens=True)
        extra = num_extra_begins(self._tokenizer, encoded.ids)
        return self._append_end(Encoded(encoded.ids[extra:], encoded.label_mask[extra:]))

    def _encode_tokens(self, row: Encoded) -> Encoded:
        """Return tokens as they are. One of weight 0 is no label, because it adds nothing to a loss and its divisor."""
        label_mask = [True] * len(row.ids) if self._labels_all else row.label_mask
        if row.token_weights is None:
            return Encoded(row.ids, label_mask)
        own = np.where(label_mask, np.array(row.token_weights, np.float32), 0)
        is_weighted = np.any((own != 0) & (own != 1))
        return Encoded(row.ids, (own > 0).tolist(), token_weights=own.tolist() if is_weighted else None)

    def _encode_chat(self, row: Chat) -> list[Encoded]:
        if not any(row.trained) and not self._has_head:
            raise BadRow("has nothing to learn: no assistant message")
        if self._labels_all:
            return [self._encode_all(row)]
        shown, answers = shown_answers(self._template, row, last_only=self._settings.turns == "last")
        unread = unshown_keys(self._template, shown)
        return [replace(self._encode_answers(own), unread=unread) for own in divide(answers, self._settings.turns)]

    def _encode_answers(self, answers: list[Answer]) -> Encoded:
        """Encode a row of several answers: the last one's text, which the others are in."""
        text = answers[-1].prompt + answers[-1].text
        spans = [(len(answer.prompt), len(answer.prompt + answer.text)) for answer in answers]
        end_tokens = [len(answer.prompt + answer.content) for answer in answers if answer.end_token]
        encoded = self._tokenize(text, spans, end_tokens, add_special_tokens=False)
        return encoded if answers[-1].end_token else self._append_end(encoded)

    def _encode_all(self, row: Chat) -> Encoded:
        """Encode a conversation of which every token is a label."""
        text = self._template.render(row.messages, row.tools)
        check_prompt(self._template, replace(row, trained=(False,) * len(row.trained)), text)
        unread = unshown_keys(self._template, row)
        last = len(row.messages) - 1
        answer = self._template.find_answer(row, last) if row.messages[last]["role"] == "assistant" else None
        for index, message in enumerate(row.messages):
            if message["role"] == "assistant":
                check_answer(self._template, row, index, answer.text if answer and index == last else text)
        encoded = self._tokenize(text, [(0, len(text))], [], add_special_tokens=False)
        # a row for a head is the text as it is shown
        lacks_end = answer is not None and not answer.end_token and not self._has_head
        return replace(self._append_end(encoded) if lacks_end else encoded, unread=unread)

    def _tokenize(self, text: str, spans: list[Span], end_tokens: list[int], *, add_special_tokens: bool) -> Encoded:
        """Return the tokens of a text. Labels are the tokens inside a span, and those that begin an end token.

        ``end_tokens``: characters where end tokens start. They are listed beside the spans, because an end token may
        include white space after it, and then reaches out of its span.
        """
        coded = self._tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        edges = itertools.chain.from_iterable(coded["offset_mapping"])
        # fromiter, because numpy takes twice as long for a list of pairs
        first, stop = np.fromiter(edges, np.int64).reshape(-1, 2).T
        # each token is extended to the end of the token before, because some tokenizers exclude a token's own space
        first = np.minimum(first, np.concatenate([[0], np.maximum.accumulate(stop)[:-1]]))
        # added tokens are no problem: one before an answer may include its first spaces, and counts as prompt then
        ordinary = ~np.isin(coded["input_ids"], self._added_ids)
        if any(np.any((first < start) & (start < stop) & ordinary) for start, _ in spans):
            # a token reaches across the start of an answer, which cannot happen in use: the prompt is tokenised alone
            return self._tokenize_in_pieces(text, spans, add_special_tokens=add_special_tokens)
        label_mask = np.zeros(len(first), dtype=bool)
        for start, end in spans:  # an empty token at a span's end is outside
            label_mask |= (start <= first) & (stop <= end) & ((first < stop) | (first < end))
        for end_token in end_tokens:
            label_mask |= (first <= end_token) & (end_token < stop)
        label_mask &= np.array(coded["special_tokens_mask"]) == 0
        return Encoded(list(coded["input_ids"]), label_mask.tolist())

    def _tokenize_in_pieces(self, text: str, spans: list[Span], *, add_special_tokens: bool) -> Encoded:
        """Return the tokens of a text that is cut at every edge of a span, so that no token crosses an edge."""
        edges = sorted({0, len(text)} | {edge for span in spans for edge in span})
        ids: list[int] = []
        label_mask: list[bool] = []
        for first, stop in itertools.pairwise(edges):
            piece = text[first:stop]
            tokens = self._tokenize_inner(piece) if first else self._tokenize_first(piece, add_special_tokens)
            ids += tokens
            label_mask += [any(start <= first and stop <= end for start, end in spans)] * len(tokens)
        # both from tokens, because a tokenizer may write a text otherwise, such as its accents, or append an end token
        expected = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        texts = [str(self._tokenizer.decode(one)).strip() for one in (ids, expected)]
        if len({one.removesuffix(self._tokenizer.eos_token).strip() for one in texts}) > 1:
            raise BadRow("the tokenizer cannot tell the prompt from the answer: end the prompt before a space")
        return Encoded(ids, label_mask)

    def _tokenize_first(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text's beginning, without the end token that some tokenizers append."""
        ids = list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        return ids[:-1] if add_special_tokens and ids[-1:] == [self._tokenizer.eos_token_id] else ids

    def _tokenize_inner(self, text: str) -> list[int]:
        """Return the tokens of a text from the middle of a row.

        It is tokenised after a line break, because some tokenizers prepend a space to a text, but not after a break.
        """
        line_break = self._tokenizer("\n", add_special_tokens=False)["input_ids"]
        ids = self._tokenizer("\n" + text, add_special_tokens=False)["input_ids"]
        if ids[: len(line_break)] == line_break:
            return list(ids[len(line_break) :])
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _append_end(self, encoded: Encoded) -> Encoded:
        """Make the tokenizer's end token the last label; append the token unless the row ends with it."""
        end = self._tokenizer.eos_token_id
        if encoded.ids and encoded.ids[-1] == end:
            return Encoded(encoded.ids, [*encoded.label_mask[:-1], True])
        return Encoded([*encoded.ids, end], [*encoded.label_mask, True])


def divide(answers: Sequence[Answer], turns: str) -> list[list[Answer]]:
    """Return the answers of each row of a conversation, at least one row, in order. ``turns``: as `data.turns`.

    The tokens before each answer are those of its prompt in use. So a row holds several answers where the text of each,
    up to its end token, is the beginning of the last one's prompt. Where the template shows an earlier answer otherwise
    once others follow, such as without its thinking, it is a row of its own:

        row 1   <|user|>hi<|end|><|assistant|>[hm</think>yes<|end|>]
        row 2   <|user|>hi<|end|><|assistant|>yes<|end|><|user|>and now<|end|><|assistant|>[so</think>no<|end|>]
    Raises BadRow: ``turns`` is ``all``, and the answers do not fit into one row.
    """
    if turns == "each":
        return [[answer] for answer in answers]
    rows = list[list[Answer]]()
    waiting = list(answers)
    while waiting:
        last = waiting.pop()
        joined = [one for one in waiting if one.end_token and last.prompt.startswith(one.prompt + one.text)]
        waiting = [one for one in waiting if one not in joined]
        rows.append([*joined, last])
        if waiting and turns == "all":
            form = "the chat template shows an earlier answer in another form once others follow"
            why = form if waiting[-1].end_token else "no end token follows an earlier answer"
            raise BadRow(f"data.turns: all: {why}; `auto` makes a row of it")
    return rows[::-1]


def head_row(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Return the token ids of a row for a head, and how many special tokens end it.

    A tokenizer that has a separator, as those of encoders, writes it between two texts. Raises BadRow: a text holds
    one, so where the second text begins would not be known.
    """
    separates = separates_texts(tokenizer)
    texts = (prompt, completion) if prompt and separates else (prompt + completion,)
    coded = tokenizer(*texts, return_special_tokens_mask=True, verbose=False)
    ids, special = coded["input_ids"], coded["special_tokens_mask"]
    if separates and (tokenizer.sep_token_id, 0) in zip(ids, special, strict=True):
        raise BadRow(f"holds {tokenizer.sep_token}, which separates texts")
    return ids, sum(itertools.takewhile(bool, reversed(special)))


def separates_texts(tokenizer: Any) -> bool:
    """True if two texts, given together, are more than one behind the other."""
    added = tokenizer.num_special_tokens_to_add
    return tokenizer.sep_token is not None and bool(added(pair=True) > added(pair=False))


def num_extra_begins(tokenizer: Any, ids: list[int]) -> int:
    """Return 1 if a text begins with the begin token that the tokenizer writes before it too; else 0."""
    begin = tokenizer.bos_token_id
    return int(begin is not None and ids[:2] == [begin, begin])
