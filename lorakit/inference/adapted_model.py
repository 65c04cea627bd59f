"""Many adapters on one base in Python: load, unload, replace, and choose one per row.

Invariant: the base is never written, and a row's output does not depend on the adapters of other rows.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.dtype import choose_dtype
from lorakit.base.find import find_base
from lorakit.base.load import generation_settings, load_tokenizer
from lorakit.base.loading import load_any_base
from lorakit.errors import LorakitError, PatchError, did_you_mean
from lorakit.files.base_files import open_base_files
from lorakit.files.dtypes import dtype_name
from lorakit.inference.bind import PatchSource, build_slots, check_replacements_called, merged_copy, quantization_note
from lorakit.inference.prompts import Prompt, PromptCodec
from lorakit.lora.routing import Adapter, Route, SlotHook
from lorakit.patch import BaseIdentity, BaseShapes, Caps, Patch, check_base, check_fits, read_patch, unverified_note
from lorakit.patch.patch import DEFAULT_CAPS

Adapters = str | None | Sequence[str | None]
"""The name of one adapter for all rows, or one name per row. None means the plain base."""
MAX_CACHED_ROUTES: Final = 2
"""Mixed-batch routes whose concatenated A and B are cached between calls."""


def load(
    base: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    quantize: str = "none",
    revision: str | None = None,
    allow_base_mismatch: bool = False,
) -> "AdaptedModel":
    """Load a base (folder, hub id or ``builtin:tiny``) and the named patches, on the GPU if there is one.

    ``quantize``: quantise the linear layers while they are read (nf4, fp4, int8), like the recipe's `base.quantize`.

    Raises:
        BaseModelError: no such base. PatchError: a patch is damaged, or belongs to another base.
    """
    if not isinstance(base, str | Path):
        raise LorakitError(f"base: the folder or name of a model, got a {type(base).__name__}; lorakit loads it itself")
    if adapters is not None and not isinstance(adapters, Mapping):
        raise LorakitError(
            f"adapters: a mapping of names to patch folders such as {{'sql': 'adapters/sql'}}, got {adapters!r}"
        )
    folder = find_base(str(base), revision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_any_base(folder, choose_dtype(dtype_name(dtype), device).dtype, device, quantize)
    adapted = AdaptedModel(model, load_tokenizer(folder), BaseIdentity(open_base_files(folder)))
    for name, path in (adapters or {}).items():
        adapted.load_adapter(name, path, allow_base_mismatch=allow_base_mismatch)
    return adapted


class AdaptedModel:
    """A frozen base and its loaded adapters.

    Calls in different threads may use different adapters. A thread started inside a ``using`` block does not inherit
    the block's route. Loading, unloading and replacing an adapter never change a call under way.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, identity: BaseIdentity | None, prompts: PromptCodec | None = None
    ) -> None:
        self.model, self.tokenizer, self._identity = model.requires_grad_(False), tokenizer, identity
        self._prompts = prompts or PromptCodec(model, tokenizer)
        # neutral, because transformers reads every setting from here that `generate` is not passed, such as penalties
        self.model.generation_config = generation_settings()
        self._shapes = BaseShapes.of(model)
        self._route: ContextVar[Route | None] = ContextVar("route", default=None)
        self._adapters: dict[str, Adapter] = {}
        self._sources: dict[str, PatchSource] = {}
        self._hooked_layers: set[str] = set()
        self._mixed_routes: tuple[Route, ...] = ()
        self._loading, self._sampling = threading.Lock(), threading.Lock()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per adapter whose base was compared by shapes alone, or was quantised in another way."""
        return tuple(source.note for source in self._sources.values() if source.note)

    def load_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        replace: bool = False,
        allow_base_mismatch: bool = False,
        caps: Caps = DEFAULT_CAPS,
    ) -> None:
        """Load a patch under a name; with ``replace`` it replaces the adapter of that name.

        The patch is validated in full before it becomes visible, so an error changes nothing. Calls under way finish
        with the adapter they began with. ``caps``: limits on the patch's sizes, checked before any allocation.

        Raises:
            PatchError: damaged, not fitting, too large, of another base, or the name is taken.
        """
        patch = read_patch(path, caps)
        with self._loading:
            if not isinstance(name, str) or not name:
                raise PatchError(f"adapter name: a text, got {name!r}; load_adapter(name, folder)")
            if name in self._adapters and not replace:
                raise PatchError(f"adapter name {name!r} is taken; choose another, or say replace=True to swap it")
            self._check(patch, allow_base_mismatch)
            slots = build_slots(patch, self.model)
            check_replacements_called(patch, self.model, slots)
            # a hook stays when its adapter is unloaded: without a slot on the route, it returns the layer's output
            for layer in slots.keys() - self._hooked_layers:
                kind = self._shapes.layers[layer][0] if layer in self._shapes.layers else None
                hook = SlotHook(layer, kind, self._route)
                self.model.get_submodule(layer).register_forward_hook(hook, with_kwargs=True)
                self._hooked_layers.add(layer)
            note = unverified_note(patch, "the base") or quantization_note(patch, self.model)
            self._mixed_routes = ()  # they refer to the adapter that is replaced
            self._sources[name] = PatchSource(Path(path), patch.digest, note)
            self._adapters[name] = Adapter(name, slots)  # last: from here on calls can use it

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. The base, the other adapters and calls under way are unchanged."""
        with self._loading:
            self._resolve(name)
            self._mixed_routes = ()  # they would keep its tensors in memory
            del self._adapters[name], self._sources[name]

    @contextmanager
    def using(self, adapters: Adapters) -> Iterator["AdaptedModel"]:
        """Use one adapter, or one per row of the batch, for every call in the block; None is the plain base."""
        with self._routed(self._resolve(adapters)):
            yield self

    @contextmanager
    def merged(self, name: str) -> Iterator["AdaptedModel"]:
        """Yield a model with the adapter merged in: each weight is the exact sum W + s B A, rounded once.

        Tensors without an update are shared with the base, which is never written, so calls in other threads are
        unaffected. The patch is read again from its folder.

        Raises:
            LorakitError: no such adapter. PatchError: its folder changed since it was loaded.
        """
        self._resolve(name)
        source = self._sources[name]
        patch = read_patch(source.folder)
        if patch.digest != source.digest:
            raise PatchError(f"{source.folder}: has changed since it was loaded as {name!r}; load it again")
        yield AdaptedModel(merged_copy(patch, self.model, self._shapes), self.tokenizer, None, self._prompts)

    def __call__(self, *args: Any, adapters: Adapters = None, **inputs: Any) -> Any:
        """Run the model's own forward; ``adapters`` as in ``using``, default: the surrounding block's."""
        named = (inputs.get("input_ids"), inputs.get("inputs_embeds"))
        first = args[0] if args else next((value for value in named if value is not None), None)
        with self._routed(self._route_for(adapters, None if first is None else first.shape[0], "a batch of {} rows")):
            return self.model(*args, **inputs)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        adapters: Adapters = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        raw: bool = False,
    ) -> list[str]:
        """Return one answer per prompt: greedy at temperature 0, else sampled.

        A prompt is a user's text or a list of messages, rendered by the chat template if there is one. With ``raw`` a
        text goes to the model unchanged, as rows of prompt + completion are trained. ``adapters``: one for all prompts,
        or one per prompt; default: the surrounding ``using`` block's.

        Raises:
            LorakitError: a prompt that cannot be encoded, or numbers out of range.
        """
        if isinstance(prompts, str | torch.Tensor):
            what = (
                "one text; write generate([text])"
                if isinstance(prompts, str)
                else "token ids; call the model with them"
            )
            raise LorakitError(f"prompts: a list of prompts, got {what}")
        route = self._route_for(adapters, len(prompts), "{} prompts")
        settings = self._prompts.settings(max_new_tokens, temperature, top_p, seed)
        if not prompts:
            return []
        device = next(self.model.parameters()).device
        ids, mask = (part.to(device) for part in self._prompts.encode(prompts, raw, max_new_tokens))
        with self._routed(route), self._seeded_sampling(seed) if temperature else nullcontext():
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
        return [self._prompts.decode(answer) for answer in output[:, ids.shape[1] :].tolist()]

    def _check(self, patch: Patch, allow_base_mismatch: bool) -> None:
        if self._identity is None:
            raise PatchError(f"{patch.folder}: this is a merged model, which is another base; load it onto the base")
        check_fits(patch, self._shapes, self._identity.files.folder)
        if not allow_base_mismatch:
            check_base(patch, self._identity)

    @contextmanager
    def _seeded_sampling(self, seed: int) -> Iterator[None]:
        # transformers samples from torch's global generator, so only one seeded call may run at a time
        device = next(self.model.parameters()).device
        gpus = [device] if device.type == "cuda" else []
        with self._sampling, torch.random.fork_rng(gpus):
            torch.default_generator.manual_seed(seed)
            for gpu in gpus:  # this one alone, because torch.manual_seed seeds those of other users too
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(seed)
            yield

    def _resolve(self, adapters: Adapters) -> Route:
        """Return the route to these adapters, with the tensors they have now.

        Raises:
            LorakitError: a name is not loaded, or `adapters` is not of the type Adapters.
        """
        if not (adapters is None or isinstance(adapters, str | list | tuple)):
            raise LorakitError(f"adapters: a name, None, or a list of them with one per row; got {adapters!r}")
        names = (adapters,) if adapters is None or isinstance(adapters, str) else tuple(adapters)
        if not names:
            raise LorakitError("adapters: an empty list; give one name (or None) per row")
        known = dict(self._adapters)  # a copy: another thread may unload one meanwhile
        for name in names:
            if name is not None and not isinstance(name, str):
                raise LorakitError(f"adapters: a name or None per row, got {name!r}")
            if name is not None and name not in known:
                loaded = ", ".join(map(repr, known)) or "none"
                raise LorakitError(f"adapter {name!r} is not loaded (loaded: {loaded}).{did_you_mean(name, known)}")
        route = Route(tuple(None if name is None else known[name] for name in names))
        if route.is_uniform:
            return route
        # a batch with the same rows reuses the A and B concatenated for it
        route = next((cached for cached in self._mixed_routes if cached.rows == route.rows), route)
        others = [cached for cached in self._mixed_routes if cached is not route]
        self._mixed_routes = (route, *others)[:MAX_CACHED_ROUTES]
        return route

    def _route_for(self, adapters: Adapters, count: int | None, what: str) -> Route | None:
        """Return the route of one call: the requested one, else the surrounding block's.

        count, what: the number of rows and their name in errors; None if the number is unknown.

        Raises:
            LorakitError: the route has another number of rows.
        """
        route = self._route.get() if adapters is None else self._resolve(adapters)
        per_row = not (adapters is None or isinstance(adapters, str)) or (route is not None and len(route.rows) > 1)
        if route is not None and per_row and count is not None and len(route.rows) != count:
            raise LorakitError(f"adapters: {len(route.rows)} names for {what.format(count)}")
        return route

    @contextmanager
    def _routed(self, route: Route | None) -> Iterator[None]:
        token = self._route.set(route)
        try:
            yield
        finally:
            self._route.reset(token)
