"""Draw the next tokens of requests from their logits.

Invariant: a request's tokens depend on its own logits, settings and seed. Every request has a generator of its own.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lorakit.decoding.grammar import Grammar
from lorakit.errors import LorakitError

MAX_SEED = 2**63
LEAST_TEMPERATURE: Final = 1e-30  # that is used: lower ones give the same softmax, and are 0 in float32
NUCLEUS_TOKENS: Final = 1024  # among which a nucleus is looked for first
LEAST_LOGPROB: Final = -9999.0
"""that is reported: OpenAI's and vLLM's number for what cannot come, because JSON has no infinity"""

RANGES: Final[Mapping[str, tuple[float, float, str]]] = {
    "temperature": (0, 100, "from 0 to 100"), "top_p": (1e-9, 1, "above 0, and at most 1"),
    "top_k": (-1, math.inf, "1 or more, or 0 or -1: no limit"), "min_p": (0, 1, "from 0 to 1"),
    "repetition_penalty": (1e-9, 100, "above 0, and at most 100"),
    "presence_penalty": (-2, 2, "from -2 to 2"), "frequency_penalty": (-2, 2, "from -2 to 2"),
    "seed": (-MAX_SEED, MAX_SEED - 1, "from -2**63 below 2**63"),
}  # fmt: skip
"""setting -> its least and largest value, and the two in words"""
WHOLE: Final = {"max_tokens", "min_tokens", "top_k", "seed", "logprobs"}  # settings that are whole numbers


@dataclass(frozen=True)
class SamplingSettings:
    """How a request's tokens are drawn. The names are those of OpenAI's and vLLM's requests."""

    max_tokens: int = 128
    min_tokens: int = 0  # before which no end token comes
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 are no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # texts that end the answer, which are not part of it
    stop_token_ids: tuple[int, ...] = ()  # as end tokens
    seed: int | None = None  # None is a random one
    logprobs: int | None = None  # most probable tokens to report with each token; None reports nothing
    response_format: Mapping[str, Any] | None = None  # restricts the answer, as grammar.py says; None is any text

    def check(self, num_tokens: int) -> None:
        """Raise LorakitError unless every value is in its range, for a vocabulary of ``num_tokens``."""
        ranges: dict[str, tuple[float, float, str]] = {
            "max_tokens": (1, math.inf, "1 or more (in Python max_new_tokens)"),
            "min_tokens": (0, self.max_tokens, "from 0 to max_tokens"),
            **RANGES, "logprobs": (0, num_tokens, f"from 0 to {num_tokens}"),
        }  # fmt: skip
        for name, (low, high, text) in ranges.items():
            value = getattr(self, name)
            kind = int if name in WHOLE else int | float
            # `not <=`, so that NaN is refused
            if value is not None and (not isinstance(value, kind) or not low <= value <= high):
                raise LorakitError(f"{name}: {text}, got {value!r}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < num_tokens or not -100 <= bias <= 100:
                raise LorakitError(f"logit_bias: token ids below {num_tokens}, biases -100 to 100, got {token}: {bias}")
        if outside := [token for token in self.stop_token_ids if not 0 <= token < num_tokens]:
            raise LorakitError(f"stop_token_ids: token ids below {num_tokens}, got {outside[0]}")
        if any(not text for text in self.stop):
            raise LorakitError("stop: an empty text; leave it out")


class Token(NamedTuple):
    """A token, and if they are requested, log-probabilities of the distribution after penalties, before temperature."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the most probable first


@final
class Sampler:
    """Draws the tokens of one request. prompt: token ids, which the repetition penalty counts too."""

    def __init__(
        self, settings: SamplingSettings, prompt: list[int], end_ids: frozenset[int], grammar: Grammar | None = None
    ) -> None:
        self.settings = settings
        self._end_ids = end_ids
        self._grammar = grammar
        self._prompt = torch.tensor(sorted(set(prompt)), dtype=torch.int64)
        self._biased = torch.tensor(list(settings.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(settings.logit_bias.values()), dtype=torch.float32)
        self._counts: Counter[int] = Counter()
        self.generator = torch.Generator()  # of the numbers that choose its tokens
        if settings.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(settings.seed)

    def restricted(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,) after bias, penalties, ``min_tokens`` and grammar. May be the same tensor."""
        settings = self.settings
        logits = logits.float()
        device = logits.device
        if settings.logit_bias:
            logits = logits.index_add(0, self._biased.to(device), self._biases.to(device))
        if settings.presence_penalty or settings.frequency_penalty or settings.repetition_penalty != 1.0:
            drawn = torch.tensor(list(self._counts), dtype=torch.int64)
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
            seen = torch.unique(torch.cat([self._prompt, drawn])).to(device)
            values = logits[seen]
            # Keskar et al. 2019 (arXiv 1909.05858): divide what is positive, multiply what is negative
            penalty = settings.repetition_penalty
            logits = logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))
            logits[drawn.to(device)] -= (settings.presence_penalty + settings.frequency_penalty * counts).to(device)
        if self._counts.total() < settings.min_tokens:
            logits = logits.index_fill(
                0, torch.tensor(list(self._end_ids), dtype=torch.int64, device=device), -math.inf
            )
        return logits if self._grammar is None else self._grammar.restrict(logits)

    def accept(self, token: int | None, logits: Tensor) -> Token:
        """Return the token drawn from restricted logits, or the next that the grammar takes, or raise LorakitError."""
        settings = self.settings
        while True:
            if token is None:
                raise LorakitError("min_tokens, stop_token_ids, response_format: no token is left that may come next")
            if self._grammar is None or token in self._end_ids or self._grammar.accept(token):
                break
            logits[token] = -math.inf
            (token,) = _choose(logits[None], [self])
        self._counts[token] += 1
        return Token(token) if settings.logprobs is None else with_logprobs([token], logits[None], settings.logprobs)[0]


def draw_tokens(samplers: Sequence[Sampler], logits: Sequence[Tensor | Exception]) -> list[Token | Exception]:
    """Draw each request's next token from its logits (vocabulary,), together. An error is of one request alone."""
    pairs = zip(samplers, logits, strict=True)
    rows: list[Any] = [own if isinstance(own, Exception) else _tried(sampler.restricted, own) for sampler, own in pairs]
    sound = [number for number, row in enumerate(rows) if isinstance(row, Tensor)]
    if sound:
        own = [samplers[number] for number in sound]
        tokens = _choose(pad_sequence([rows[number] for number in sound], True, -math.inf), own)
        for number, token in zip(sound, tokens, strict=True):
            rows[number] = _tried(samplers[number].accept, token, rows[number])
    return rows


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as problem:
        return problem


def _choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """Return a token for each row of restricted logits (rows, vocabulary); None for a row without any."""
    tokens = logits.argmax(-1)
    if warm := [row for row, sampler in enumerate(samplers) if sampler.settings.temperature]:
        tokens[warm] = _sampled(logits[warm], [samplers[row] for row in warm])
    is_possible = logits.gather(-1, tokens[:, None]).squeeze(-1) > -math.inf
    return [token if possible else None for token, possible in torch.stack([tokens, is_possible.long()], -1).tolist()]


def _sampled(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return a token for each row of logits (rows, vocabulary), drawn with a temperature. Overwrites them."""
    size = logits.shape[-1]
    settings = [sampler.settings for sampler in samplers]
    device = logits.device
    temperature, min_p, top_p = (
        torch.tensor([[getattr(one, name)] for one in settings], device=device)
        for name in ("temperature", "min_p", "top_p")
    )
    # the largest is 0, so that none is infinite at low temperatures
    logits = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature.clamp(min=LEAST_TEMPERATURE))
    limits = [one.top_k if 0 < one.top_k < size else size for one in settings]
    if own := [limit for limit in limits if limit < size]:
        largest = logits.topk(max(own)).values
        top_k = torch.tensor(limits, device=device)[:, None]
        least = largest.gather(-1, top_k.clamp(max=largest.shape[-1]) - 1)
        logits.masked_fill_((logits < least) & (top_k < size), -math.inf)
    probabilities = logits.softmax(-1)
    probabilities.masked_fill_(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0.0)
    if any(one.top_p < 1 for one in settings):
        probabilities.masked_fill_((probabilities < _least_of_nucleus(probabilities, top_p)) & (top_p < 1), 0.0)
    sums = probabilities.double().cumsum(-1)
    numbers = torch.stack([torch.rand(1, generator=one.generator, dtype=sums.dtype) for one in samplers])
    return torch.searchsorted(sums, numbers.to(device) * sums[:, -1:], right=True).squeeze(-1).clamp_(max=size - 1)


def _least_of_nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return for each row the least of the largest probabilities whose sum reaches top_p of all, (rows, 1)."""
    size = probabilities.shape[-1]
    total = probabilities.double().cumsum(-1)[:, -1:]
    for number in (min(NUCLEUS_TOKENS, size), size):  # sorting a vocabulary takes six times as long
        largest = probabilities.topk(number).values
        is_inside = largest.double().cumsum(-1) - largest < top_p * total
        if number == size or not (is_inside[:, -1:] & (top_p < 1)).any():
            break
    return largest.gather(-1, is_inside.sum(-1, keepdim=True).clamp(min=1) - 1)


def with_logprobs(tokens: Sequence[int], logits: Tensor, number: int) -> list[Token]:
    """Return tokens with log-probabilities, and the ``number`` most probable ones, for logits (tokens, vocabulary)."""
    logprobs = logits.log_softmax(-1).clamp_(min=LEAST_LOGPROB)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]).squeeze(-1)
    top = logprobs.topk(number)
    rows = zip(tokens, own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [Token(token, logprob, tuple(zip(ids, values, strict=True))) for token, logprob, ids, values in rows]
