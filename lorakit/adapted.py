"""Many adapters on one base in Python: load, unload, use, and choose per row."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.data import end_marker
from lorakit.dtype import choose_dtype
from lorakit.errors import LorakitError, PatchError, nearest
from lorakit.lora.inject import replace_module
from lorakit.lora.kinds import adaptable_layers
from lorakit.lora.slots import Adapter, Route, Slot, SlotLinear
from lorakit.model import find_base, generation_settings, load_base, load_tokenizer
from lorakit.patch import check_base, check_fits, read_patch

Prompt = str | list[dict[str, Any]]
Adapters = str | None | Sequence[str | None]


def load(
    base: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    allow_base_mismatch: bool = False,
) -> "AdaptedModel":
    """A base (folder, hub id or ``builtin:tiny``) with the named patches loaded, on the GPU when there is one.

    Raises:
        BaseModelError: no such base. PatchError: a patch is damaged, or belongs to another base.
    """
    folder = find_base(str(base), revision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_base(folder, choose_dtype(dtype, device).dtype, device)
    adapted = AdaptedModel(model, load_tokenizer(folder), folder)
    for name, path in (adapters or {}).items():
        adapted.load_adapter(name, path, allow_base_mismatch=allow_base_mismatch)
    return adapted


class AdaptedModel:
    """A frozen base and its loaded adapters.

    Calls in different threads may use different adapters; a thread started inside a ``using`` block does not inherit
    it. Loading, unloading and replacing an adapter never change a call that is under way.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, folder: Path) -> None:
        self.model, self.tokenizer, self._folder = model.requires_grad_(False), tokenizer, folder
        self._route: ContextVar[Route | None] = ContextVar("route", default=None)
        self._adapters: dict[str, Adapter] = {}
        self._layers = adaptable_layers(model)
        self._loading, self._sampling = threading.Lock(), threading.Lock()
        self._ends = self._end_ids()
        # transformers fills what generate is not told from here, such as penalties or several answers per prompt
        self.model.generation_config = generation_settings()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def load_adapter(self, name: str, path: str | Path, *, allow_base_mismatch: bool = False) -> None:
        """Load a patch under a name. Either all of it is loaded or, on an error, nothing has changed.

        Raises:
            PatchError: damaged, not fitting, of another base, or the name is taken.
        """
        patch = read_patch(path)
        with self._loading:
            if name in self._adapters or not name:
                raise PatchError(f"adapter name {name!r} is taken or empty; unload_adapter first, or choose another")
            check_fits(patch, self._layers, self._folder)
            if not allow_base_mismatch:
                check_base(patch, self._folder)
            slots = {}
            for key, layer in patch.layers.items():
                module = self.model.get_submodule(key)
                if not isinstance(module, SlotLinear):
                    replace_module(self.model, module, SlotLinear(key, module, self._layers[key][0], self._route))
                weight = module.weight
                assert isinstance(weight, Tensor)
                tensors = {part: tensor.to(weight.device, weight.dtype) for part, tensor in layer.tensors.items()}
                slots[key] = Slot(layer.method, layer.scale, tensors)
            self._adapters[name] = Adapter(name, slots)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the base, the others and calls that use it now are untouched."""
        with self._loading:
            self._resolve(name)
            del self._adapters[name]

    @contextmanager
    def using(self, adapters: Adapters) -> Iterator["AdaptedModel"]:
        """Every call in the block uses this adapter, or these, one per row of the batch; None is the plain base."""
        with self._routed(self._resolve(adapters)):
            yield self

    def __call__(self, *args: Any, adapters: Adapters = None, **inputs: Any) -> Any:
        """The model's own forward; ``adapters`` as in ``using``, or what the surrounding block says."""
        first = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
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
        if isinstance(prompts, str):
            raise LorakitError("prompts: a list of prompts, got one text; write generate([text])")
        route = self._route_for(adapters, len(prompts), "{} prompts")
        if max_new_tokens < 1 or not (0 <= temperature < math.inf) or not 0 < top_p <= 1:
            raise LorakitError(
                f"max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1; got {max_new_tokens}, {temperature}, {top_p}"
            )
        if not prompts:
            return []
        ids, mask = self._encode(prompts, raw, max_new_tokens)
        settings = self._settings(max_new_tokens, temperature, top_p)
        with self._routed(route), self._drawing(seed) if temperature else nullcontext():
            output = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
        answers = output[:, ids.shape[1] :].tolist()
        return [
            self.tokenizer.decode(_until(answer, settings.eos_token_id), skip_special_tokens=True) for answer in answers
        ]

    @contextmanager
    def _drawing(self, seed: int) -> Iterator[None]:
        with self._sampling, torch.random.fork_rng():  # sampling draws from the one global generator
            torch.manual_seed(seed)
            yield

    def _settings(self, max_new_tokens: int, temperature: float, top_p: float) -> Any:
        """What generate is asked for."""
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
        return generation_settings(
            max_new_tokens=max_new_tokens, eos_token_id=self._ends, pad_token_id=self._pad_id(), **sampling
        )

    def _encode(self, prompts: Sequence[Prompt], raw: bool, max_new_tokens: int) -> tuple[Tensor, Tensor]:
        """Prompts, padded on the left: ids and mask, both (rows, longest)."""
        rows = [self._prompt_ids(prompt, raw) for prompt in prompts]
        longest = max(map(len, rows))
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf  # type: ignore[union-attr, operator]
        if min(map(len, rows)) == 0 or longest + max_new_tokens > limit:
            raise LorakitError(
                f"prompts: of {min(map(len, rows))} to {longest} tokens; at least 1 is needed, and with max_new_tokens"
                f" {max_new_tokens} at most {limit} fit this base"
            )
        ids = [[self._pad_id()] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        device = next(self.model.parameters()).device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _prompt_ids(self, prompt: Prompt, raw: bool) -> list[int]:
        import jinja2

        try:
            if isinstance(prompt, str) and (raw or not self.tokenizer.chat_template):
                return list(self.tokenizer(prompt)["input_ids"])
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as problem:
            raise LorakitError(f"prompt {str(prompt)[:60]!r} cannot be encoded: {problem}") from None

    def _end_ids(self) -> list[int]:
        """Every token that ends an answer: the model's, the tokenizer's, and the chat template's."""
        told = self.model.generation_config.eos_token_id  # type: ignore[union-attr]
        ends = {self.tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])}
        if self.tokenizer.chat_template and (marker := end_marker(self.tokenizer)):
            ends.add(self.tokenizer.convert_tokens_to_ids(marker))
        return sorted(end for end in ends if end is not None)

    def _pad_id(self) -> int:
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(pad if pad is not None else end or 0)

    def _resolve(self, adapters: Adapters) -> Route:
        names = (adapters,) if adapters is None or isinstance(adapters, str) else tuple(adapters)
        if not names:
            raise LorakitError("adapters: an empty list; give one name (or None) per row")
        for name in names:
            if name is not None and name not in self._adapters:
                loaded = ", ".join(map(repr, self._adapters)) or "none"
                raise LorakitError(f"adapter {name!r} is not loaded (loaded: {loaded}).{nearest(name, self._adapters)}")
        return Route(tuple(None if name is None else self._adapters[name] for name in names))

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


def _until(ids: list[int], ends: list[int]) -> list[int]:
    return ids[: next((index for index, token in enumerate(ids) if token in ends), len(ids))]
