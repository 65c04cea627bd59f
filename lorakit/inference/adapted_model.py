"""Many adapters on one base in Python: load, unload, replace, and choose one per row.

Invariant: the base is never written, and a row's output does not depend on the adapters of other rows, beyond rounding.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.base.device import decoding_products
from lorakit.base.quantized import quantization_facts
from lorakit.base.transformers_io import generation_settings
from lorakit.data.chat_template import NO_KWARGS
from lorakit.decoding.batch import answer_all
from lorakit.decoding.embedding import pooled_states
from lorakit.decoding.generation import Generation
from lorakit.decoding.sampling import MAX_SEED, SamplingSettings
from lorakit.decoding.slot_model import RoutedModel
from lorakit.errors import AdapterNotLoadedError, BaseModelError, LorakitError, PatchError, did_you_mean
from lorakit.files.text import check_name
from lorakit.inference.bind import PatchSource, build_adapter, check_replacements_called, merged_copy
from lorakit.inference.prompts import NO_TOKENIZER, Prompt, PromptCodec
from lorakit.ops.batch_invariance import use_invariant_attention
from lorakit.ops.openmp import end_openmp_threads
from lorakit.ops.products import packed_bytes, use_products
from lorakit.patch import BaseIdentity, BaseShapes, Patch, check_base, check_fits, read_patch, unverified_note
from lorakit.patch.find import find_patch
from lorakit.patch.fit import with_head_names
from lorakit.patch.own_head import OwnHead, without_own_head
from lorakit.patch.pooling import Pooling, read_pooling
from lorakit.patch.prompting import PromptForm, trained_form
from lorakit.patch.same_base import ALLOW, Allow, quantization_note
from lorakit.slots.bank import LayerBank
from lorakit.slots.hooks import PerAdapterExperts, RouteLengthHook, SlotHook, model_input
from lorakit.slots.routing import Adapter, Route

Adapters = str | None | Sequence[str | None]
"""The name of one adapter for all rows, or one name per row. None means the plain base.

A call may take `...` instead: the adapters of the surrounding `using` block, or the base outside of one."""


@dataclass(frozen=True)
class Classification:
    """The answer of a classifier. probabilities: of each label, in the order of the adapter's recipe."""

    label: str  # the one with the largest probability
    probabilities: dict[str, float]
    labels: tuple[str, ...]  # this one; where a row may have several, all with a probability above 1/2

    def __str__(self) -> str:
        return ", ".join(f"{label}  {self.probabilities[label]:.3f}" for label in self.labels) or "no label"


def as_classification(head: OwnHead, values: Tensor) -> Classification:
    """Return the answer of a head with labels. values: its logits, (labels,)."""
    of_each = values.sigmoid() if head.has_several else values.softmax(0)
    probabilities = dict(zip(head.labels, of_each.tolist(), strict=True))
    label = head.labels[int(values.argmax())]
    above = (name for name, value in zip(head.labels, values.tolist(), strict=True) if value > 0)
    return Classification(label, probabilities, tuple(above) if head.has_several else (label,))


def head_for(head: OwnHead | None, objective: str | None) -> OwnHead:
    """Return the head of an adapter. Raises LorakitError: it has none, or not of this objective, where one is given."""
    if head is None:
        what = objective or "classify or reward"
        raise LorakitError(f"model: an adapter, or the base, has no head of its own; objective {what} trains one")
    if objective is not None and bool(head.labels) != (objective == "classify"):
        kind = "has labels (classify, /classify)" if head.labels else "gives a number (reward, /pooling)"
        raise LorakitError(f"model: this adapter {kind}")
    return head


class AdaptedModel(RoutedModel):
    """A frozen base and its loaded adapters.

    Calls in different threads may use different adapters. While a thread is inside a ``using`` block, a call in another
    one must choose its adapters, because a thread started inside the block does not have the block's choice. Loading,
    unloading and replacing an adapter never change a call under way.
    """

    def __init__(self, model: nn.Module, prompts: PromptCodec, identity: BaseIdentity | None) -> None:
        self.model = model.requires_grad_(False)
        use_invariant_attention(model)
        self.prompts = prompts
        self.tokenizer = prompts.tokenizer
        self._identity = identity
        self.folder = None if identity is None else identity.files.folder  # of the base; None: a merged copy in memory
        # neutral, because transformers reads every setting from here that `generate` is not passed, such as penalties
        self.model.generation_config = generation_settings()
        self._shapes = BaseShapes.of(model)
        self._quantization = quantization_facts(model)
        self._route: ContextVar[Route | None] = ContextVar("route", default=None)
        self._last_route: Route | None = None
        self._open_blocks = 0  # ``using`` blocks that some thread is inside
        self._counting = threading.Lock()
        length_hook = RouteLengthHook(self._route, self._refuse_other_threads_block)
        self.model.register_forward_pre_hook(length_hook, with_kwargs=True)
        self._banks: dict[str, LayerBank] = {}
        self.expected_adapters = 1  # adapters that are about to be loaded, as far as is known
        self._adapters: dict[str, Adapter] = {}
        self._sources: dict[str, PatchSource] = {}
        self._hooked_layers: set[str] = set()
        self._tokenwise = {name.rpartition(".")[0] for name in self._shapes.experts}
        """modules of experts and routers, which see the tokens of all rows at once"""
        self._loading = threading.Lock()

    def __repr__(self) -> str:
        return f"AdaptedModel({type(self.model).__name__}, adapters: {', '.join(self._adapters) or 'none'})"

    def adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter that has a name now, or None for the base. Raises AdapterNotLoadedError."""
        return self._resolve(name).adapters[0]

    def sources(self) -> dict[str, PatchSource]:
        """Return what is known of the patch of every loaded adapter, by name."""
        return dict(self._sources)

    def codec(self, adapter: Adapter | None) -> PromptCodec:
        """Return what encodes prompts and decodes answers of an adapter, whose tokenizer may have new tokens."""
        return self.prompts if adapter is None else adapter.facts

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        """Give every call in the block the adapters of a route."""
        token = self._route.set(route)
        try:
            yield
        finally:
            self._route.reset(token)

    def prepack(self, max_bytes: int) -> bool:
        """Compute with copies of the linear layers' weights that the CPU reads faster, if that takes ``max_bytes``.

        Returns whether it does: not where it was measured to gain nothing, and not on GPUs. Results differ by rounding.
        """
        if packed_bytes(self.model) > max_bytes or decoding_products(self.model, prepack=True) != "prepacked":
            return False
        use_products(self.model, "prepacked")
        return True

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def is_loaded(self, name: str) -> bool:
        return name in self._adapters

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence if the adapters brought the chat template, and for each whose base could not be compared."""
        is_brought = self._identity is not None and self._identity.brought
        brought = ["note: prompts are written by the chat template that the adapters bring with them"]
        return *(brought if is_brought else []), *(source.note for source in self._sources.values() if source.note)

    def load_adapter(
        self, name: str, path: str | Path, *, replace: bool = False, allow: Collection[Allow] = ()
    ) -> None:
        """Load a patch under a name; ``replace``: also where an adapter has that name, which it replaces.

        ``path``: a folder, or on the hub ``ORGANISATION/NAME`` or ``ORGANISATION/NAME@REVISION``.

        The patch is validated in full before it becomes visible, so an error changes nothing. Calls under way finish
        with the adapter they began with.
        ``allow``: ``base`` accepts another base than the patch was trained on, ``template`` one whose chat template or
        tokenizer settings changed since then.
        Raises PatchError: damaged, not fitting, too large, of another base, or the name is taken.
        """
        self.add_patch(name, read_patch(find_patch(path)), replace=replace, allow=allow)

    def add_patch(self, name: str, patch: Patch, *, replace: bool = False, allow: Collection[Allow] = ()) -> None:
        """Load a patch that ``read_patch`` returned, as ``load_adapter`` does."""
        with self._loading:
            if name in self._adapters and not replace:
                raise PatchError(f"adapter name {name!r} is taken; choose another, or say replace=True to swap it")
            facts = self.prompts.of_patch(patch)
            if facts.head is not None:
                facts.head = facts.head.on(self.model, facts.tokenizer, patch.folder)
            patch = self._fitting(name, patch, allow)
            same = (one for one in self._adapters.values() if one.identity == patch.identity)
            adapter = None if patch.identity is None else next(same, None)
            if adapter is None:
                adapter = build_adapter(patch, self.model, self._shapes, self._banks, facts, self.expected_adapters)
                check_replacements_called(patch, self.model, adapter.slots)
            # a hook stays when its adapter is unloaded: without a slot on the route, it returns the layer's output
            for layer in adapter.slots.keys() - self._hooked_layers:
                module = self.model.get_submodule(layer)
                if layer in self._tokenwise:
                    module.__dict__["forward"] = PerAdapterExperts(layer, module.forward, self._route)
                else:
                    kind = self._shapes.layers[layer][0] if layer in self._shapes.layers else None
                    module.register_forward_hook(SlotHook(layer, kind, self._route), with_kwargs=True)
                self._hooked_layers.add(layer)
            self._sources[name] = self._source(patch)
            with self._counting:
                self._adapters[name] = adapter  # last: from here on calls can use it
                self._last_route = None
        end_openmp_threads()

    def check_patch(self, name: str, patch: Patch, *, allow: Collection[Allow] = ()) -> PatchSource:
        """Return what is known of a patch that could be loaded, without its values. Raises PatchError: it could not."""
        return self._source(self._fitting(name, patch, allow))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. The base, the other adapters and calls under way are unchanged."""
        with self._loading:
            self._resolve(name)
            with self._counting:
                del self._adapters[name], self._sources[name]
                self._last_route = None  # it would keep the adapter's tensors in memory

    @contextmanager
    def using(self, adapters: Adapters) -> Iterator["AdaptedModel"]:
        """Use one adapter, or one per row of the batch, for every call in the block; None is the plain base."""
        route = self._resolve(adapters)
        with self._counting:
            self._open_blocks += 1
        try:
            with self.routed(route):
                yield self
        finally:
            with self._counting:
                self._open_blocks -= 1

    @contextmanager
    def merged(self, name: str) -> Iterator["AdaptedModel"]:
        """Yield a model with the adapter merged in: each weight is the exact sum W + s B A, rounded once.

        Tensors without an update are shared with the base, which is never written, so calls in other threads are
        unaffected. The patch is read again from its folder.
        Raises LorakitError: no such adapter. PatchError: its folder changed since it was loaded.
        """
        codec, source = self.codec(self.adapter(name)), self._sources[name]
        if codec.head is not None:
            raise LorakitError(f"merged: {name!r} has a head of its own, for which a model in memory has no place")
        patch = read_patch(source.folder)  # as it was loaded, which `identity` compares
        if patch.identity != source.identity:
            raise PatchError(f"{source.folder}: has changed since it was loaded as {name!r}; load it again")
        patch = self._fitting(name, patch, ALLOW)  # as it was accepted before
        yield AdaptedModel(merged_copy(patch, self.model, self._shapes), codec, None)

    def __call__(self, *args: Any, adapters: Adapters | EllipsisType = ..., **inputs: Any) -> Any:
        """Run the model's own forward; ``adapters`` as in ``using``; `...`: the surrounding block's."""
        first = model_input(args, inputs)
        with self.routed(self._chosen(adapters, None if first is None else len(first), "a batch of {} rows")):
            return self.model(*args, **inputs)

    def generate(
        self,
        prompts: Sequence[Prompt],
        adapters: Adapters | EllipsisType = ...,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        raw: bool | None = None,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> list[str]:
        """Return one answer per prompt: greedy at temperature 0, else sampled, number i with ``seed`` + i.

        A prompt is a list of messages, rendered by the chat template, or a text, which is given as the rows of its
        adapter were in training: as a user's message, after the system prompt that all of them had, or unchanged where
        the rows were plain text; or a list of token ids. ``raw``: give texts unchanged, or (False) as messages.
        ``tools``: functions in OpenAI's form that the chat template shows; an answer may then be a call, as text.
        ``chat_template_kwargs``: variables for the template, before those that an adapter was trained with.
        ``adapters``: one for all, or one per prompt, None for the base; `...`: the surrounding ``using`` block's.
        Raises LorakitError: a prompt that cannot be encoded, or numbers out of range.
        """
        if self.tokenizer is None:
            raise LorakitError(f"generate: {NO_TOKENIZER}, or give token ids to generate_ids")
        settings = SamplingSettings(max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
        answers = self._answer(prompts, adapters, settings, raw, tools, chat_template_kwargs)
        return [self.codec(one.adapter).decode(one.ids(), one.prompt) for one in answers]

    def generate_ids(
        self,
        prompts: Sequence[Prompt],
        adapters: Adapters | EllipsisType = ...,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        raw: bool | None = None,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] = NO_KWARGS,
        on_answer: Callable[[], None] | None = None,
    ) -> list[list[int]]:
        """Return the token ids of one answer per prompt, up to its first end token; arguments as of ``generate``.

        A base without a tokenizer takes prompts of token ids alone. ``on_answer``: called after each answer.
        """
        settings = SamplingSettings(max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
        answers = self._answer(prompts, adapters, settings, raw, tools, chat_template_kwargs, on_answer)
        return [one.ids() for one in answers]

    def classify(self, rows: Sequence[Prompt], adapters: Adapters | EllipsisType = ...) -> list[Classification]:
        """Return the label or labels of each row, with the probabilities of all, by adapters trained to classify.

        A row is a text, messages with their answers, token ids, or a tuple of two texts, such as a question and a
        document, and is encoded as the rows of training were.
        ``adapters``: as of ``generate``. Raises LorakitError: an adapter does not classify, or a row does not fit.
        """
        return [as_classification(head, own) for head, own in self._head_values(rows, adapters, "classify")]

    def reward(self, rows: Sequence[Prompt], adapters: Adapters | EllipsisType = ...) -> list[float]:
        """Return the reward of each row, a conversation with its answer; arguments and errors as of ``classify``."""
        return [float(own) for _, own in self._head_values(rows, adapters, "reward")]

    def embed(
        self, texts: Sequence[Prompt], adapters: Adapters | EllipsisType = ..., *, dimensions: int | None = None
    ) -> Tensor:
        """Return the embedding of each text, (texts, width) float32 on the CPU, pooled as the adapter or the base says.

        A text may be token ids. ``adapters``: as of ``generate``. ``dimensions``: how many leading values to keep.
        Raises LorakitError: there are no embeddings, or none of so many values, or a text does not fit.
        """
        chosen = self._adapters_of(texts, adapters)
        poolings = [self.pooling(adapter) for adapter in chosen]
        codecs = [self.codec(adapter) for adapter in chosen]
        rows = zip(codecs, texts, poolings, strict=True)
        ids = [codec.text_ids(text, pooling) for codec, text, pooling in rows]
        states = pooled_states(self, ids, chosen, poolings)
        vectors = [pooling.embedding(state, dimensions) for pooling, state in zip(poolings, states, strict=True)]
        return torch.stack(vectors) if vectors else torch.empty(0, 0)

    def pooling(self, adapter: Adapter | None) -> Pooling:
        """Return how an adapter's embeddings are pooled, or the base's. Raises BaseModelError: neither says."""
        return self.codec(adapter).pooling or self._own_pooling

    @cached_property
    def _own_pooling(self) -> Pooling:
        if self.folder is None:
            raise BaseModelError("a merged copy in memory has no embeddings; save it, and load the folder")
        return read_pooling(self.folder)

    def _head_values(
        self, rows: Sequence[Prompt], adapters: Adapters | EllipsisType, objective: str
    ) -> list[tuple[OwnHead, Tensor]]:
        """Return each row's head, which is of this objective, with its values, (values,) float32."""
        chosen = self._adapters_of(rows, adapters)
        codecs = [self.codec(adapter) for adapter in chosen]
        heads = [head_for(codec.head, objective) for codec in codecs]
        ids = [codec.row_ids(row) for codec, row in zip(codecs, rows, strict=True)]
        states = pooled_states(self, ids, chosen, [head.pooling for head in heads])
        return [(head, head.values(state)) for head, state in zip(heads, states, strict=True)]

    def _adapters_of(self, rows: Sequence[Prompt], adapters: Adapters | EllipsisType) -> tuple[Adapter | None, ...]:
        """Return the adapter of each row. Raises LorakitError: rows are no list, or another number than adapters."""
        if isinstance(rows, str) or not isinstance(rows, Sequence):  # characters of a text would be the rows
            what = repr(rows)[:60]
            raise LorakitError(f"prompts: a list of prompts, got {what}; for one prompt write [prompt]")
        route = self._chosen(adapters, len(rows), "{} prompts")
        return route.adapters * len(rows) if len(route.adapters) == 1 else route.adapters

    def _answer(
        self,
        prompts: Sequence[Prompt],
        adapters: Adapters | EllipsisType,
        settings: SamplingSettings,
        raw: bool | None,
        tools: list[Any] | None,
        template_kwargs: Mapping[str, Any],
        on_answer: Callable[[], None] | None = None,
    ) -> list[Generation]:
        """Return the finished generation of each prompt. settings: of the first one; the others have the next seeds."""
        settings.check(self.prompts.num_tokens)
        chosen = self._adapters_of(prompts, adapters)
        if not prompts:
            return []
        generations = []
        for number, (prompt, adapter) in enumerate(zip(prompts, chosen, strict=True)):
            codec = self.codec(adapter)
            form = codec.form if raw is None else PromptForm(raw, codec.form.system)
            ids = codec.token_ids(prompt, form, tools, template_kwargs=template_kwargs)
            codec.check_answers()
            codec.check_ids(ids, settings.max_tokens)
            own = replace(settings, seed=((settings.seed or 0) + number) % MAX_SEED)
            generations.append(Generation(adapter, ids, own, frozenset(codec.end_ids), on_end=on_answer))
        answer_all(self, generations)
        return generations

    def _fitting(self, name: str, patch: Patch, allow: Collection[Allow]) -> Patch:
        """Return a patch that fits, in the names of this model."""
        check_name(name, "load_adapter(name, folder)", PatchError)
        if self._identity is None:
            raise PatchError(f"{patch.folder}: this is a merged model, which is another base; load it onto the base")
        named = without_own_head(with_head_names(patch, self._shapes, self.model))
        check_fits(named, self._shapes, self._identity.files.name)
        check_base(patch, self._identity, allow=allow)
        return named

    def _source(self, patch: Patch) -> PatchSource:
        note = unverified_note(patch, "the base") or quantization_note(patch, self._quantization)
        rank = max((layer.rank for layer in patch.layers.values()), default=0)
        return PatchSource(
            patch.folder.absolute(), patch.identity, note, rank, patch.num_bytes, trained_form(patch.metadata)
        )

    def _chosen(self, adapters: Adapters | EllipsisType, num_rows: int | None, rows: str) -> Route:
        """Return a call's route. Raises LorakitError: it is of another number than ``num_rows``. rows: their name."""
        route = self._route.get() if isinstance(adapters, EllipsisType) else self._resolve(adapters)
        if route is None:
            self._refuse_other_threads_block()
            route = self._resolve(None)
        count = len(route.adapters)
        one_for_all = count == 1 and not isinstance(adapters, list | tuple)  # a list of one is meant for one row
        if num_rows not in (None, count) and not one_for_all:
            raise LorakitError(f"adapters: {count} names for {rows.format(num_rows)}")
        return route

    def _refuse_other_threads_block(self) -> None:
        """Raise an error if a `using` block is open. For a call outside of any block in its own thread."""
        if self._open_blocks:
            why = "another thread is inside a `using` block, whose choice a thread started there does not have"
            raise LorakitError(f"adapters: {why}; choose here too: adapters=..., or using(...), with None for the base")

    def _resolve(self, adapters: Adapters) -> Route:
        """Return the route of a choice: one adapter, or one per row."""
        names = adapters if isinstance(adapters, list | tuple) else (adapters,)
        if not names or not all(name is None or isinstance(name, str) for name in names):
            raise LorakitError(f"adapters: a name, None, or a list of them with one per row; got {adapters!r}")
        known = dict(self._adapters)  # a copy: another thread may unload one meanwhile
        for name in names:
            if name is not None and name not in known:
                loaded = ", ".join(map(repr, known)) or "none"
                near = did_you_mean(name, known)
                raise AdapterNotLoadedError(f"adapter {name!r} is not loaded (loaded: {loaded}).{near}")
        route = Route(tuple(None if name is None else known[name] for name in names))
        last = self._last_route
        if last is not None and last.adapters == route.adapters:
            return last  # with the indices that are on the device already, for which a GPU would wait
        with self._counting:
            if all(name is None or self._adapters.get(name) is known[name] for name in names):  # else one was unloaded
                self._last_route = route
        return route
