"""Many adapters on one base in Python: load, unload, replace, use, and choose per row."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lorakit.base.dtype import choose_dtype
from lorakit.base.load import find_base, generation_settings, load_tokenizer
from lorakit.base.quantized import load_any_base
from lorakit.errors import LorakitError, PatchError, did_you_mean
from lorakit.inference.bind import PatchSource, bind, check_called, merged_copy, quantization_note
from lorakit.inference.prompts import Prompt, PromptCodec
from lorakit.lora.routing import Adapter, Route, SlotHook
from lorakit.patch import (
    BaseIdentity,
    BaseShapes,
    Caps,
    Patch,
    check_base,
    check_fits,
    open_base_files,
    read_patch,
    unverified_note,
)  # fmt: skip
from lorakit.patch.patch import DEFAULT_CAPS

Adapters = str | None | Sequence[str | None]
MAX_CACHED_ROUTES: Final = 2
"""routes of several adapters whose tensors stay laid side by side between calls"""


def load(
    base: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    quantize: str = "none",
    revision: str | None = None,
    allow_base_mismatch: bool = False,
) -> "AdaptedModel":
    """A base (folder, hub id or ``builtin:tiny``) with the named patches loaded, on the GPU when there is one.

    ``quantize``: pack its linear layers while they are read (nf4, fp4, int8), as the recipe's key of that name does.

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
    model = load_any_base(folder, choose_dtype(str(dtype).removeprefix("torch."), device).dtype, device, quantize)
    adapted = AdaptedModel(model, load_tokenizer(folder), BaseIdentity(open_base_files(folder)))
    for name, path in (adapters or {}).items():
        adapted.load_adapter(name, path, allow_base_mismatch=allow_base_mismatch)
    return adapted


class AdaptedModel:
    """A frozen base and its loaded adapters.

    Calls in different threads may use different adapters; a thread started inside a ``using`` block does not inherit
    it. Loading, unloading and replacing an adapter never change a call that is under way.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, identity: BaseIdentity | None, prompts: PromptCodec | None = None
    ) -> None:
        self.model, self.tokenizer, self._identity = model.requires_grad_(False), tokenizer, identity
        self._prompts = prompts or PromptCodec(model, tokenizer)
        # transformers fills what generate is not told from here, such as penalties or several answers per prompt
        self.model.generation_config = generation_settings()
        self._shapes = BaseShapes.of(model)
        self._route: ContextVar[Route | None] = ContextVar("route", default=None)
        self._adapters: dict[str, Adapter] = {}
        self._sources: dict[str, PatchSource] = {}
        self._hooked: set[str] = set()
        self._mixed: tuple[Route, ...] = ()
        self._loading, self._sampling = threading.Lock(), threading.Lock()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for every adapter whose base could only be compared by its shapes, or was packed otherwise."""
        return tuple(source.note for source in self._sources.values() if source.note)

    def load_adapter(
        self, name: str, path: str | Path, *, replace: bool = False, allow_base_mismatch: bool = False,
        caps: Caps = DEFAULT_CAPS,
    ) -> None:  # fmt: skip
        """Load a patch under a name; with ``replace`` it takes the place of the one that has the name.

        It is validated in full and then visible at once. On an error nothing has changed. Calls under way keep what
        they began with. ``caps``: how much the patch may ask for, looked at before anything is allocated.

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
            slots = bind(patch, self.model)
            check_called(patch, self.model, slots)
            for layer in slots.keys() - self._hooked:
                kind = self._shapes.layers[layer][0] if layer in self._shapes.layers else None
                hook = SlotHook(layer, kind, self._route)
                self.model.get_submodule(layer).register_forward_hook(hook, with_kwargs=True)
                self._hooked.add(layer)
            self._mixed = ()
            self._adapters[name], self._sources[name] = (
                Adapter(name, slots),
                PatchSource(
                    Path(path), patch.digest, unverified_note(patch, "the base") or quantization_note(patch, self.model)
                ),
            )

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the base, the others and calls that use it now are untouched."""
        with self._loading:
            self._resolve(name)
            self._mixed = ()
            del self._adapters[name], self._sources[name]

    @contextmanager
    def using(self, adapters: Adapters) -> Iterator["AdaptedModel"]:
        """Every call in the block uses this adapter, or these, one per row of the batch; None is the plain base."""
        with self._routed(self._resolve(adapters)):
            yield self

    @contextmanager
    def merged(self, name: str) -> Iterator["AdaptedModel"]:
        """The base with an adapter merged in, as a model of its own for the block: each weight is the exact sum,
        rounded once, of the base's and what the patch's folder holds.

        The base itself is shared and not touched, so calls in other threads go on as they were.

        Raises:
            LorakitError: no such adapter. PatchError: its folder no longer holds what was loaded.
        """
        self._resolve(name)
        source = self._sources[name]
        patch = read_patch(source.folder)
        if patch.digest != source.digest:
            raise PatchError(f"{source.folder}: has changed since it was loaded as {name!r}; load it again")
        yield AdaptedModel(merged_copy(patch, self.model, self._shapes), self.tokenizer, None, self._prompts)

    def __call__(self, *args: Any, adapters: Adapters = None, **inputs: Any) -> Any:
        """The model's own forward; ``adapters`` as in ``using``, or what the surrounding block says."""
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
        """One answer per prompt: greedy at temperature 0, else sampled.

        A prompt is a user's text or a list of messages, rendered by the chat template when there is one; with ``raw``
        a text is given to the model as it is, as rows of prompt + completion are trained. ``adapters``: one for all, or
        one per prompt; without it, what the surrounding ``using`` block says.

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
        with self._sampling, torch.random.fork_rng():  # sampling draws from the one global generator
            torch.manual_seed(seed)
            yield

    def _resolve(self, adapters: Adapters) -> Route:
        if not (adapters is None or isinstance(adapters, str | list | tuple)):
            raise LorakitError(f"adapters: a name, None, or a list of them with one per row; got {adapters!r}")
        names = (adapters,) if adapters is None or isinstance(adapters, str) else tuple(adapters)
        if not names:
            raise LorakitError("adapters: an empty list; give one name (or None) per row")
        known = dict(self._adapters)
        for name in names:
            if name is not None and not isinstance(name, str):
                raise LorakitError(f"adapters: a name or None per row, got {name!r}")
            if name is not None and name not in known:
                loaded = ", ".join(map(repr, known)) or "none"
                raise LorakitError(f"adapter {name!r} is not loaded (loaded: {loaded}).{did_you_mean(name, known)}")
        route = Route(tuple(None if name is None else known[name] for name in names))
        if route.is_uniform:
            return route
        # the same rows again use what was laid side by side for them
        route = next((kept for kept in self._mixed if kept.rows == route.rows), route)
        self._mixed = (route, *(kept for kept in self._mixed if kept is not route))[:MAX_CACHED_ROUTES]
        return route

    def _route_for(self, adapters: Adapters, count: int | None, what: str) -> Route | None:
        """The route of one call: what it asks for, else what the surrounding block says."""
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
