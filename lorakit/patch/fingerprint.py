"""Fingerprint a base, and compare the fingerprints of patches with bases and with each other.

A fingerprint has digests of the tensors that a patch adapts, of those that none adapts (embedding, norms, head), of the
config, of the tokenizer and of how prompts are written (prompting.py). An adapted weight has two digests
(weight_digest.py), a fast one of samples and one of every value.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from lorakit.errors import BaseModelError, PatchError
from lorakit.files.base_files import BaseFiles, open_base_files, read_json
from lorakit.files.dtypes import parse_dtype
from lorakit.patch.allow import Allow, RefusedBaseError
from lorakit.patch.patch import Patch
from lorakit.patch.prompting import chat_template_digest, template_digest, tokenizer_settings_digest, trained_form
from lorakit.patch.weight_digest import Source, sample_digest, value_digests

SCHEME = "sampled-1"
FULL_SCHEME = "full-1"
PROMPTING: Final = ("chat_template", "tokenizer_settings")
"""parts of a fingerprint that say how prompts are written"""
NOT_IDENTITY: Final = {  # config keys that do not change what the weights mean
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures",
    "is_matryoshka", "matryoshka_dimensions",
}  # fmt: skip


class BaseIdentity:
    """Digests of a base on disk. Each is computed when it is first used, then cached.

    ``tokenizer_folder``: of the tokenizer in use, if it is not the base's own. ``template``: text of the chat template
    in use, if it is not the tokenizer's own. ``split_parameters``: reads a parameter that the files hold in several
    tensors, such as the experts of a layer that are stored one by one; None refuses a patch of such a parameter.
    """

    def __init__(
        self,
        files: BaseFiles,
        tokenizer_folder: Path | None = None,
        template: str | None = None,
        split_parameters: Callable[[str], Source] | None = None,
    ) -> None:
        self.files = files
        self.tokenizer_folder = tokenizer_folder or files.folder
        self.template = template
        self._split_parameters = split_parameters
        self._sampled: dict[tuple[str, str | None], str] = {}

    @cached_property
    def config_values(self) -> dict[str, Any]:
        return {key: value for key, value in self.files.config().items() if key not in NOT_IDENTITY}

    @cached_property
    def config(self) -> str:
        return _json_digest(self.config_values)

    @cached_property
    def tokenizer(self) -> str | None:
        path = self.tokenizer_folder / "tokenizer.json"
        if not path.is_file():
            return None
        return _json_digest(
            # without the settings of the last call, which saving a tokenizer writes there
            {key: value for key, value in read_json(path).items() if key not in ("truncation", "padding")}
        )

    @cached_property
    def chat_template(self) -> str | None:
        return chat_template_digest(self.tokenizer_folder) if self.template is None else template_digest(self.template)

    @cached_property
    def tokenizer_settings(self) -> str | None:
        return tokenizer_settings_digest(self.tokenizer_folder)

    @cached_property
    def unadapted(self) -> dict[str, Any]:
        """Digests of what a patch need not adapt: embedding, head and final norm (``outside``), and those of layers.

        ``vectors`` is one digest of all vectors, ``matrices`` one of all matrices, the adapted ones too. Matrices have
        two samples each, because a base of experts has ten thousands of them.
        """
        outside = set()
        vectors = []
        matrices = []
        for name, shard in sorted(self.files.shard_of.items()):
            entry = shard.entries[name]
            in_layer = re.search(r"\.\d+\.", name) is not None
            is_weight = name.endswith(".weight") or ".experts." in name  # and not a buffer, such as GPT-2's causal mask
            if in_layer and is_weight and len(entry.shape) > 1:
                matrices.append(sample_digest(*self._source(name, None), runs=2))
            elif not entry.dtype.is_floating_point or not name.endswith((".weight", ".bias")):
                continue  # the state of a quantised weight, or a buffer
            elif not in_layer:
                outside.add(sample_digest(*self._source(name, None)))  # a set, because a tied head may be stored or not
            elif len(entry.shape) == 1:
                vectors.append(sample_digest(*self._source(name, None)))
        return {"outside": sorted(outside), "vectors": _json_digest(vectors), "matrices": _json_digest(matrices)}

    def sampled(self, modules: Iterable[str], rounded_to: str | None = None) -> dict[str, str]:
        """Return module -> ``sampled-1`` digest of its weight.

        ``rounded_to``: name of the dtype that values are rounded to first; None: not rounded. A tied head has no weight
        of its own and is left out. The 3-D parameter of experts has the digest that it has in memory, however the
        files store it.
        """
        return self._digests(
            modules, rounded_to, self._sampled, lambda sources: [sample_digest(*one) for one in sources]
        )

    def full(self, modules: Iterable[str], rounded_to: str | None = None) -> dict[str, str]:
        """Return module -> ``full-1`` digest of its weight; arguments as of ``sampled``."""
        return self._digests(modules, rounded_to, {}, value_digests)

    def _digests(
        self, modules: Iterable[str], rounded_to: str | None, cache: dict[tuple[str, str | None], str],
        digest: Callable[[list[Source]], list[str]],
    ) -> dict[str, str]:  # fmt: skip
        sources = {
            module: self._weight_source(module, rounded_to) for module in modules if (module, rounded_to) not in cache
        }
        stored = {module: source for module, source in sources.items() if source is not None}
        for module, value in zip(stored, digest(list(stored.values())), strict=True):
            cache[module, rounded_to] = value
        return {module: cache[module, rounded_to] for module in modules if (module, rounded_to) in cache}

    def _weight_source(self, module: str, rounded_to: str | None) -> Source | None:
        """Return the source of a module's weight, or of a parameter of experts; None for a tied head."""
        if module in self.files.shard_of:
            return self._source(module, rounded_to)
        try:
            return self._source(self.files.weight_name(module), rounded_to)
        except BaseModelError:
            if ".experts." in module and self._split_parameters is not None:
                shape, read = self._split_parameters(module)
                dtype = parse_dtype(rounded_to) or torch.float32
                return shape, lambda start, stop: read(start, stop).to(dtype)
            if self._tied and ".experts." not in module:
                return None
            raise

    @cached_property
    def _tied(self) -> bool:
        config = self.files.config()
        text = config.get("text_config")
        return bool((text if isinstance(text, dict) else config).get("tie_word_embeddings", True))

    def _source(self, name: str, rounded_to: str | None) -> Source:
        shard = self.files.shard_of[name]
        dtype = parse_dtype(rounded_to) or shard.entries[name].dtype
        return shard.entries[name].shape, lambda start, stop: shard.read_elements(name, start, stop).to(dtype)


def fingerprint(identity: BaseIdentity, modules: Iterable[str]) -> dict[str, Any]:
    """Return the fingerprint of a base on disk for the given adapted modules, with both digests."""
    modules = list(modules)
    return {
        "scheme": SCHEME, "config": identity.config, "tokenizer": identity.tokenizer, "rounded_to": None,
        "config_values": identity.config_values, "unadapted": identity.unadapted,
        **{part: getattr(identity, part) for part in PROMPTING},
        "weights": identity.sampled(modules), "full": {"scheme": FULL_SCHEME, "weights": identity.full(modules)},
    }  # fmt: skip


def check_base(patch: Patch, base: Path | BaseIdentity, *, full: bool = False, allow: Collection[Allow] = ()) -> None:
    """Raise PatchError unless ``base`` is the base that the patch was trained on.

    A patch without a fingerprint, which another program wrote, passes. ``full``: compare digests of every value of the
    adapted weights, not of samples. ``allow``: accept another base, or prompts that are written in another way.

    Raises:
        PatchError: another base; names the differences. Or ``full`` with a patch that has digests of samples only.
    """
    if "base" in allow:
        return
    recorded = patch.metadata.get("base")
    if recorded is None:
        _check_prompting(patch, base, allow)
        return
    if recorded["scheme"] != SCHEME:
        raise PatchError(
            f"{patch.folder}: base fingerprint of an unknown scheme {recorded['scheme']!r}; update lorakit"
        )
    identity = base if isinstance(base, BaseIdentity) else BaseIdentity(open_base_files(base))
    rounded_to = recorded.get("rounded_to")
    expected = recorded["weights"]
    # an adapter of an own model without linear layers has digests of other weights of its base
    actual = identity.sampled(dict.fromkeys([*patch.layers, *expected]), rounded_to)
    names = list(actual)
    if full and all(actual[name] == expected.get(name) for name in names):
        expected = full_digests(patch)
        actual = identity.full(names, rounded_to)
        if expected is None:
            raise PatchError(f"{patch.folder}: holds samples of its base's weights, not digests of all their values")
    differing = [name for name in names if expected.get(name) != actual[name]]
    parts = [f"{len(differing)} of {len(names)} adapted weights ({differing[0]} first)"] if differing else []
    for part, value in (("config", identity.config), ("tokenizer", identity.tokenizer)):
        if recorded.get(part) and value and recorded[part] != value:
            values = recorded.get("config_values"), identity.config_values
            parts.append(_config_difference(*values, ("in training", "here")) if part == "config" else part)
    if changed := _changed_unadapted(recorded.get("unadapted") or {}, identity.unadapted):
        parts.append(changed)
    if parts:
        raise mismatch(patch, identity.files.folder, " and ".join(parts))
    _check_prompting(patch, identity, allow)


def _check_prompting(patch: Patch, identity: Path | BaseIdentity, allow: Collection[Allow]) -> None:
    """Raise PatchError unless prompts are written here as in training, as far as that is known."""
    if "template" in allow or not isinstance(identity, BaseIdentity):
        return
    if changed := changed_prompting(patch, identity):
        here = f"{identity.files.folder} has" if identity.template is None else "is in use here"
        raise RefusedBaseError(
            f"{patch.folder}: was trained with another {changed} than {here}, so the same prompt is another text; put"
            " the trained one back",
            "template",
        )


def changed_prompting(patch: Patch, identity: BaseIdentity) -> str:
    """Name the prompt settings that differ from training; empty if none is known to."""
    recorded = patch.metadata.get("base") or {}
    used = [part for part in PROMPTING if part != "chat_template" or not trained_form(patch.metadata).raw]
    # a template that another adapter brought is not that of a patch without a record
    known = {*recorded, *(["chat_template"] if identity.template is not None else [])}
    changed = [part for part in used if part in known and recorded.get(part) != getattr(identity, part)]
    return " and other ".join(part.replace("_", " ") for part in changed)


def unverified_note(patch: Patch, base: object) -> str | None:
    """Return a note for the user if a patch has no fingerprint, so that only its shapes were compared; else None."""
    if patch.metadata.get("base") is not None:
        return None
    made_for = f", for {patch.config.base_model}" if patch.config.base_model else ""
    return (
        f"note: {patch.folder} holds no digest of its base (another program wrote it{made_for});"
        f" only shapes were compared with {base}"
    )


def compared_parts(patch: Patch, *, full: bool) -> str:
    """Return the parts of a base that ``check_base`` compares, for a sentence."""
    unadapted = (patch.metadata.get("base") or {}).get("unadapted") or {}
    rest = "samples of the embedding, norms and head" if unadapted else "nothing else"
    rest = "samples of all others" if "matrices" in unadapted else rest
    return f"{'every value' if full else 'samples'} of {len(patch.layers)} adapted weights and {rest}"


def compared_by(patch: Patch) -> str:
    """Return how a patch can be compared with a base: by shapes, by samples of the weights, or by every value."""
    if patch.metadata.get("base") is None:
        return "shapes"
    return "samples" if full_digests(patch) is None else "every value"


def full_digests(patch: Patch) -> Mapping[str, str] | None:
    """Return module -> ``full-1`` digest of its base's weight; None if the patch has no such digests."""
    full = (patch.metadata.get("base") or {}).get("full") or {}
    return full.get("weights") if full.get("scheme") == FULL_SCHEME else None


def mismatch(patch: Patch, base: Path, differing: str) -> RefusedBaseError:
    """Return the error of a patch on a base that it was not trained on. ``differing``: the parts that do."""
    return RefusedBaseError(
        f"{patch.folder}: trained on another base than {base}: {differing} differ. It was made for {patch.made_for}",
        "base",
    )


def base_rounding(patch: Patch) -> str:
    """Return the name of the dtype that the base's weights were rounded to before their digests were computed."""
    return patch.metadata["base"].get("rounded_to") or "float32"


def comparable(one: Patch, two: Patch) -> bool:
    """True if the weight digests of both patches were computed after the same rounding."""
    return base_rounding(one) == base_rounding(two)


def base_differences(one: Patch, two: Patch) -> list[str]:
    """Return the differences between the bases of two patches that have fingerprints; only comparable parts count."""
    a = one.metadata["base"]
    b = two.metadata["base"]
    differences = []
    if comparable(one, two):
        tables = [(a["weights"], b["weights"]), (full_digests(one) or {}, full_digests(two) or {})]
        shared = {name for x, y in tables for name in x if name in y}
        wrong = sorted({name for x, y in tables for name in x if name in y and x[name] != y[name]})
        if wrong:
            differences.append(f"the weights of {len(wrong)} of {len(shared)} shared layers ({wrong[0]} first)")
    if changed := _changed_unadapted(a.get("unadapted") or {}, b.get("unadapted") or {}):
        differences.append(changed)
    keys = ("config", "tokenizer", *PROMPTING)
    for key in keys:
        if a.get(key) and b.get(key) not in (None, a[key]):
            values = a.get("config_values"), b.get("config_values")
            where = ("in the first", "in the second")
            differences.append(_config_difference(*values, where) if key == "config" else key)
    return differences


def _config_difference(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None, where: tuple[str, str]) -> str:
    """Return ``config``, with the keys that differ and both values if these were recorded."""
    if one is None or two is None:
        return "config"
    return f"config ({'; '.join(_differing_keys(one, two, where))})"


def _differing_keys(
    one: Mapping[str, Any], two: Mapping[str, Any], where: tuple[str, str], within: str = ""
) -> Iterator[str]:
    for key in sorted({*one, *two}):
        a = one.get(key)
        b = two.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differing_keys(a, b, where, f"{within}{key}.")
        else:
            one_text, two_text = (repr(values[key])[:60] if key in values else "absent" for values in (one, two))
            if a != b or one_text != two_text:
                yield f"{within}{key}: {one_text} {where[0]}, {two_text} {where[1]}"


def joint_fingerprint(patches: Sequence[Patch], names: Sequence[str]) -> dict[str, Any] | None:
    """Join the patches' fingerprints into one that covers all ``names``.

    None if a name is missing, because a partial fingerprint would match no base. Requires that all patches were made
    on the same base, rounded alike.
    """
    bases = [patch.metadata["base"] for patch in patches]
    weights, full = (
        {name: table[name] for table in tables for name in names if name in table}
        for tables in ([base["weights"] for base in bases], [full_digests(patch) or {} for patch in patches])
    )
    if len(weights) < len(names):
        return None
    keys = ("config", "config_values", "tokenizer", "rounded_to", "unadapted", *PROMPTING)
    shared = {key: next((base[key] for base in bases if base.get(key)), None) for key in keys}
    shared = {key: value for key, value in shared.items() if value is not None or any(key in base for base in bases)}
    full_part = {"full": {"scheme": FULL_SCHEME, "weights": full}} if len(full) == len(names) else {}
    return {"scheme": SCHEME, **shared, "weights": weights, **full_part}


def _changed_unadapted(recorded: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Name the kinds of tensors that are others, as far as both fingerprints cover them; empty if none is."""
    changed = {key for key, value in recorded.items() if key in actual and actual[key] != value}
    names = ["embedding, norms or head"] if changed & {"outside", "vectors"} else []
    return " and ".join([*names, *(["weights that it does not adapt"] if "matrices" in changed else [])])


def _json_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
