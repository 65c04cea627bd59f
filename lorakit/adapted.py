"""Many adapters on one base in Python: load, unload, use, and choose per row."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorakit.data import end_marker
from lorakit.dtype import choose_dtype
from lorakit.errors import LorakitError, PatchError, nearest
from lorakit.lora.inject import replace_module
from lorakit.lora.kinds import Kind, is_linear_like, kind_of
from lorakit.lora.slots import Route, Slot, SlotLinear
from lorakit.model import find_base, load_base, load_tokenizer
from lorakit.patch import Patch, check_fingerprint, check_fits, fingerprint, open_base_files, read_patch

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
    """A frozen base and its loaded adapters. Calls in different threads may use different adapters."""

    def __init__(self, model: nn.Module, tokenizer: Any, folder: Path) -> None:
        self.model, self.tokenizer, self._folder = model.requires_grad_(False), tokenizer, folder
        self._route: ContextVar[Route | None] = ContextVar("route", default=None)
        self._adapters: dict[str, Patch] = {}

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def load_adapter(self, name: str, path: str | Path, *, allow_base_mismatch: bool = False) -> None:
        """Load a patch under a name. Either all of it is loaded or, on an error, nothing has changed.

        Raises:
            PatchError: damaged, not fitting, of another base, or the name is taken.
        """
        if name in self._adapters or not name:
            raise PatchError(f"adapter name {name!r} is taken or empty; unload_adapter first, or choose another")
        patch = read_patch(path)
        linear = self._linear_layers()
        check_fits(patch, {key: (kind, sizes) for key, (_, kind, sizes) in linear.items()}, self._folder)
        if not allow_base_mismatch:
            found = fingerprint(open_base_files(self._folder), patch.layers)
            check_fingerprint(patch.facts.get("base"), found, patch.folder, self._folder)
        for key, layer in patch.layers.items():
            module, kind, _ = linear[key]
            if not isinstance(module, SlotLinear):
                module, old = SlotLinear(key, module, kind, self._route), module
                replace_module(self.model, old, module)
            weight = module.weight
            tensors = {part: tensor.to(weight.device, weight.dtype) for part, tensor in layer.tensors.items()}
            module.slots = {**module.slots, name: Slot(layer.method, layer.scale, tensors)}
        self._adapters[name] = patch

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the base and the others are untouched."""
        self._check_names([name])
        del self._adapters[name]
        for module in self.model.modules():
            if isinstance(module, SlotLinear):
                module.slots = {key: slot for key, slot in module.slots.items() if key != name}

    @contextmanager
    def using(self, adapters: Adapters) -> Iterator["AdaptedModel"]:
        """Every call in the block uses this adapter, or these, one per row of the batch; None is the plain base."""
        rows = _rows(adapters)
        self._check_names(rows)
        if not rows:
            raise LorakitError("adapters: an empty list; give one name (or None) per row")
        token = self._route.set(Route(rows))
        try:
            yield self
        finally:
            self._route.reset(token)

    def __call__(self, *args: Any, adapters: Adapters = None, **inputs: Any) -> Any:
        """The model's own forward; ``adapters`` as in ``using``, or what the surrounding block says."""
        if adapters is None:
            return self.model(*args, **inputs)
        first = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
        if not isinstance(adapters, str) and first is not None and len(adapters) != first.shape[0]:
            raise LorakitError(f"adapters: {len(adapters)} names for a batch of {first.shape[0]} rows")
        with self.using(adapters):
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
    ) -> list[str]:
        """One answer per prompt: greedy at temperature 0, else sampled.

        A prompt is a user's text or a list of messages, rendered by the chat template when there is one.
        ``adapters``: one for all, or one per prompt; without it, what the surrounding ``using`` block says.
        """
        if isinstance(prompts, str):
            raise LorakitError("prompts: a list of prompts, got one text; write generate([text])")
        if not prompts:
            return []
        if adapters is not None and not isinstance(adapters, str) and len(adapters) != len(prompts):
            raise LorakitError(f"adapters: {len(adapters)} names for {len(prompts)} prompts")
        ids, mask = self._encode(prompts)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
        )
        ends = self._end_ids()
        route = self._route.get() if adapters is None else Route(_rows(adapters))
        with self.using(route.rows if route else None), torch.random.fork_rng():
            torch.manual_seed(seed)
            output = self.model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, eos_token_id=ends,
                pad_token_id=self._pad_id(), num_beams=1, **sampling,
            )  # fmt: skip
        answers = output[:, ids.shape[1] :].tolist()
        return [self.tokenizer.decode(_until(answer, ends), skip_special_tokens=True) for answer in answers]

    def _encode(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """Prompts, padded on the left: ids and mask, both (rows, longest)."""
        rows = [self._prompt_ids(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        ids = [[self._pad_id()] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        device = next(self.model.parameters()).device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not self.tokenizer.chat_template:
            return list(self.tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

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

    def _linear_layers(self) -> dict[str, tuple[nn.Module, Kind, tuple[int, int]]]:
        found: dict[str, tuple[nn.Module, Kind, tuple[int, int]]] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, SlotLinear):
                found[name] = (module, module.kind, (module.out_features, module.in_features))
            elif is_linear_like(module) and (kind := kind_of(module)):
                found[name] = (module, kind, kind.sizes(module))
        return found

    def _check_names(self, names: Sequence[str | None]) -> None:
        for name in names:
            if name is not None and name not in self._adapters:
                loaded = ", ".join(map(repr, self._adapters)) or "none"
                raise LorakitError(f"adapter {name!r} is not loaded (loaded: {loaded}).{nearest(name, self._adapters)}")


def _rows(adapters: Adapters) -> tuple[str | None, ...]:
    return (adapters,) if adapters is None or isinstance(adapters, str) else tuple(adapters)


def _until(ids: list[int], ends: list[int]) -> list[int]:
    return ids[: next((index for index, token in enumerate(ids) if token in ends), len(ids))]
