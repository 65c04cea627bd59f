"""Run a model on the slots of a KV cache: rows of different adapters, each with tokens of its own stored."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from inspect import signature
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lorakit.base.layers import FULL, SLIDING, first_position, other_layer_kinds
from lorakit.base.transformers_io import vocabulary_size
from lorakit.decoding.generation import Generation
from lorakit.decoding.kv_cache import SlotCache, has_states
from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import BaseModelError, translate_error
from lorakit.lora.untrained import relative_difference, tolerance
from lorakit.ops.attention_parts import attention_in_parts
from lorakit.ops.batch_invariance import BatchSizes
from lorakit.ops.encoder_head import is_encoder
from lorakit.slots.routing import Route

WITH_STATES: Final = ("linear_attention", "conv", "hybrid", "mamba", "moe", "mlp")
"""kinds of layers that have states, or nothing, beside those that have keys"""
STATE_TOLERANCE: Final = 10  # times as much where states are computed in parts
LONGEST: Final = 9  # tokens of a prompt in the check
PLAIN_NAME: Final = "past_key_values"  # of the argument that the cache is, unless a model's is `cache_params`
REMEDY: Final = "`lorakit generate` answers with this base"


class RoutedModel(ABC):
    """A model whose calls in the block of a route use it: the adapters of their rows."""

    model: nn.Module

    @abstractmethod
    def routed(self, route: Route) -> AbstractContextManager[None]: ...

    @cached_property
    def slots(self) -> "SlotModel | None":
        """This model on slots, made with a few forwards; None if its base's attention does not work on them."""
        try:
            return SlotModel(self)
        except BaseModelError as problem:
            self._problem = str(problem)
        return None

    @property
    def slots_note(self) -> str | None:
        """Why answers take more time or memory than those of other bases; None: they do not."""
        slots = self.slots
        return slots.note if slots else f"transformers' `generate` answers, which takes longer: {self._problem}"


@final
class SlotModel:
    """A base with its adapters, and the slots of its rows, or BaseModelError: its attention does not work on slots."""

    note: str | None = None  # why rows take more memory or time than with other bases; None: they do not

    def __init__(self, model: RoutedModel) -> None:
        self._model = model
        self._device = next(model.model.parameters()).device
        self._routes: dict[bool, Route] = {}
        """of the last batch, and of the last row alone (True): most steps have one of both, with factors by layer"""
        name = type(model.model).__name__
        self._cache_name = "cache_params" if "cache_params" in signature(model.model.forward).parameters else PLAIN_NAME
        self.takes_parts = self._cache_name == PLAIN_NAME
        """False if an input has to be computed at once, because states begin anew with each part, as Mamba's do"""
        try:
            self._make_cache(one_size=False)
        except BaseModelError:  # such as a model that computes with the keys that the cache gives
            self.takes_parts = not has_states(model.model.config.get_text_config())  # type: ignore[union-attr, operator]
            self._make_cache(one_size=self.takes_parts)
            self.note = f"each row has a slot as long as the longest one's, as {name} takes no others"
        if not self.takes_parts:
            self.note = f"prompts are computed at once, and other rows wait, as {name} takes no parts of them"

    def with_own_slots(self) -> "SlotModel":
        """Return the same model with slots of its own, for rows of another batch."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)  # after the check, no row has a slot
        other._routes = {}
        return other

    def forward(self, rows: Sequence[Generation], num_new: int) -> Tensor:
        """Compute up to ``num_new`` next tokens of each row. All have slots.

        Returns the logits after each row's last token, (rows, vocabulary) in float32. Rows of a base with
        states have equally many next tokens, because padding would reach the states.
        """
        order = self.cache.in_order(rows)
        rows = [rows[index] for index in order]
        pending = [row.tokens[row.num_stored : row.num_stored + num_new] for row in rows]
        counts = [len(tokens) for tokens in pending]
        num_tokens = self._sizes.tokens(max(counts))
        # rows that only fill the batch, copies of the last one, have no keys and no slot
        num_rows = self._sizes.rows(len(rows), num_tokens)
        num_more = num_rows - len(rows)
        # padded on the left, so that the last position of each row has its logits
        padded = [[0] * (num_tokens - len(tokens)) + tokens for tokens in pending + num_more * pending[-1:]]
        positions = self.cache.begin(rows, counts, num_tokens, self._sizes.width)
        positions = torch.cat([positions, positions[-1:].expand(num_more, -1)])
        in_parts = attention_in_parts(self._model.model) if len(self.cache.parts) > 1 else nullcontext()
        with self._model.routed(self._route_of(rows, num_more)), in_parts:
            output = self._model.model(
                input_ids=torch.tensor(padded, device=self._device),
                position_ids=positions + first_position(self._model.model.config),
                attention_mask=attention_masks(self._model.model, positions, self.cache.width),
                use_cache=True,
                # an index and no number, because a slice of each row would be multiplied row by row
                logits_to_keep=torch.arange(num_tokens - self._sizes.logits(num_rows), num_tokens, device=self._device),
                **{self._cache_name: self.cache},
            )
        self.cache.commit()
        logits: Tensor = output.logits[: len(rows), -1].float()
        return logits[torch.tensor(order, device=self._device).argsort()]

    def forget(self) -> None:
        """Drop the last route: it would keep the adapters of rows that left in memory, though they are unloaded."""
        self._routes.clear()

    def _route_of(self, rows: Sequence[Generation], num_more: int) -> Route:
        """Return the route of rows, and of more that have the last one's adapter."""
        adapters = tuple(row.adapter for row in rows)
        adapters += num_more * adapters[-1:]
        is_alone = len(rows) == 1  # such as a prompt, after which the batch beside it comes again
        route = self._routes.get(is_alone)
        if route is None or route.adapters != adapters:
            route = self._routes[is_alone] = Route(adapters, height=self._sizes.height)
        return route

    @torch.no_grad()
    def _make_cache(self, *, one_size: bool) -> None:
        """Make the cache, and compare the logits of a prompt in parts, beside another row, with those without cache.

        Raises BaseModelError: they differ, or a layer has no keys, values or states.
        """
        model = self._model.model
        name = type(model).__name__
        if others := sorted(set(other_layer_kinds(model)) - set(WITH_STATES)):
            raise BaseModelError(f"base: {name} has layers of the kind {', '.join(others)}, without slots; {REMEDY}")
        if is_encoder(model):  # whose rows are no answers, and have no slots
            self.cache = SlotCache(model.config.get_text_config(), self._device, one_size=True)  # type: ignore[union-attr, operator]
            return
        num_tokens = vocabulary_size(model)
        prompts = [[(7 * index + size) % num_tokens for index in range(size)] for size in (LONGEST, 4)]
        rows = [Generation(None, prompt, SamplingSettings()) for prompt in prompts]
        sizes = [LONGEST, LONGEST] if one_size else [LONGEST, LONGEST - 1]
        # also where transformers does not know the layers' caches
        failures = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
        with translate_error(failures, BaseModelError, f"base: {name} cannot be served"):
            config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
            self.cache = SlotCache(config, self._device, one_size=one_size)
            self._sizes = BatchSizes(1) if self.cache.has_states else BatchSizes.of(model)
            self.cache.arrange(dict(zip(rows, sizes, strict=True)), Counter(sizes))
            for row in rows:
                while (count := min(3 if self.takes_parts else LONGEST, row.num_pending - 1)) > 0:
                    self.forward([row], count)
                    row.num_stored += count
            actual = self.forward(rows, 1)
            ids = [torch.tensor([prompt], device=self._device) for prompt in prompts]
            with self._model.routed(Route((None,))):
                alone = [model(input_ids=one, use_cache=False).logits[0, -1] for one in ids]
            expected = torch.stack(alone).float()
        for row in rows:
            self.cache.free(row)
        self.cache.arrange({}, {})
        difference = relative_difference(actual, expected)
        if difference > tolerance(next(model.parameters())) * (STATE_TOLERANCE if self.cache.has_states else 1):
            why = f"its logits beside another row differ by {difference:.1%} from those alone"
            raise BaseModelError(f"base: {name} cannot be served: {why}; {REMEDY}")


def attention_masks(model: nn.Module, positions: Tensor, width: int) -> Any:
    """Return the mask of a forward, (rows, 1, new tokens, width), or for layers of several kinds a mask by kind.

    None for a model of states alone. positions: of the new tokens, (rows, new tokens).
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    window = getattr(config, "sliding_window", None)
    own_kinds = set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])
    if own_kinds <= {"linear_attention"}:
        return None
    kinds = own_kinds & {FULL, SLIDING} or {FULL}
    own = positions[:, None, :, None]
    stored = torch.arange(width, device=positions.device)
    causal = stored <= own
    masks = {kind: causal if kind == FULL or window is None else causal & (stored > own - window) for kind in kinds}
    if not config._attn_implementation.endswith("sdpa"):  # eager attention adds the mask to the scores
        dtype = next(model.parameters()).dtype
        masks = {kind: torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype) for kind, mask in masks.items()}
    if not own_kinds.isdisjoint(WITH_STATES):  # a row has no padding that they would have to leave out
        return masks | dict.fromkeys(WITH_STATES[:2])
    return masks if len(masks) > 1 else next(iter(masks.values()))
