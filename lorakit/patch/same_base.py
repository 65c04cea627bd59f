"""Check that a base is the one that a patch was trained on, and compare two fingerprints of bases."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from torch import nn

from lorakit.errors import BaseModelError, PatchError
from lorakit.files.base_files import open_base_files, read_json
from lorakit.files.safetensors import parse_dtype
from lorakit.files.text import count_of, flatten
from lorakit.patch.fingerprint import FULL_SCHEME, PROMPTING, SCHEME, BaseIdentity, live_sources, sample_digest
from lorakit.patch.patch import Patch
from lorakit.patch.prompting import chat_template_digest, trained_form

Allow = Literal["base", "template"]
"""``base``: other weights, config or tokenizer. ``template``: prompts that are written in another way."""
ALLOW: Final[tuple[Allow, ...]] = get_args(Allow)
SHOWN_KEYS: Final = 4  # of two configs that differ
TOKENIZER: Final = "tokenizer.json"


class RefusedBaseError(PatchError):
    """A patch on a base that the caller can accept with ``allow``."""

    def __init__(self, problem: str, allow: Allow) -> None:
        super().__init__(f"{problem}; to use it all the same, pass --allow {allow} (in Python allow={{{allow!r}}})")
        self.problem = problem  # the message without the option, for callers that have none


def check_base(patch: Patch, base: Path | BaseIdentity, *, full: bool = True, allow: Collection[Allow] = ()) -> None:
    """Raise PatchError unless ``base`` is the base that the patch was trained on; names the differences.

    A patch without a fingerprint, which another program wrote, passes, as ``unverified_note`` says. ``full``: compare
    every value of the adapted weights where the patch has digests of them, not samples. ``allow``: accept another base,
    or prompts that are written in another way.
    """
    if "base" in allow:
        return
    identity = base if isinstance(base, BaseIdentity) else BaseIdentity(open_base_files(base))
    if (recorded := patch.metadata.get("base")) is not None:
        _check_recorded(patch, recorded, identity, full=full)
    if "template" in allow:
        return
    if changed := changed_prompting(patch, identity):
        here = f"{identity.files.folder} has" if identity.template is None else "is in use here"
        remedy = "put the trained one back"
        if patch.metadata.get("chat_template"):
            remedy = "merge it, because the patch brings its own chat template, which the merged model has"
        problem = f"was trained with another {changed} than {here}, so the same prompt is another text"
        raise RefusedBaseError(f"{patch.folder}: {problem}; {remedy}", "template")
    check_tokenizer_beside(patch, identity)


def _check_recorded(patch: Patch, recorded: Mapping[str, Any], identity: BaseIdentity, *, full: bool) -> None:
    """Raise PatchError unless a base has the recorded weights, config and tokenizer."""
    if (scheme := recorded["scheme"]) != SCHEME:
        raise PatchError(f"{patch.folder}: base fingerprint of an unknown scheme {scheme!r}; update lorakit")
    rounded_to = recorded.get("rounded_to")
    expected = recorded["weights"]
    # an adapter of an own model without linear layers has digests of other weights of its base
    stored = dict.fromkeys(stored for name in (*patch.layers, *expected) for stored in identity.stored_names(name))
    try:
        actual = identity.sampled(stored, rounded_to)
    except BaseModelError as problem:  # such as a scale of codes, where this base has floats
        raise mismatch(patch, identity.files.name, f"tensors ({problem})") from None
    names = list(actual)
    digests = full_digests(patch)
    if full and digests is not None and all(actual[name] == expected.get(name) for name in names):
        expected = digests
        actual = identity.full(names, rounded_to)
    differing = [name for name in names if expected.get(name) != actual[name]]
    here = {key: getattr(identity, key) for key in ("config", "config_values", "tokenizer", "unadapted")}
    adapted = [_counted(patch, differing, names)] if differing else []
    if parts := base_differences(recorded, here, ("in training", "here"), adapted):
        raise mismatch(patch, identity.files.name, " and ".join(parts))


def _counted(patch: Patch, differing: Sequence[str], compared: Sequence[str]) -> str:
    """Return how many of the compared tensors differ: several of an adapted weight with scales, or of split experts."""
    number = len(patch.layers)
    kind = "adapted weights" if number in (0, len(compared)) else f"tensors of {number} adapted weights"
    return f"{len(differing)} of {len(compared)} {kind} ({differing[0]} first)"


def check_live_base(patch: Patch, model: nn.Module) -> None:
    """Raise PatchError unless the adapted weights in memory, by samples, are those of training."""
    recorded = patch.metadata.get("base")
    if recorded is None:
        return
    dtype = parse_dtype(recorded.get("rounded_to"))
    expected = recorded["weights"]
    # an own model's adapter without linear layers has digests of other weights of its base
    batches = live_sources(model, patch.layers or expected, dtype)
    actual = {name: sample_digest(*source) for sources in batches for name, source in sources.items()}
    differing = [name for name, digest in actual.items() if expected.get(name) != digest]
    if differing:
        problem = f"was trained on another base than this model: {_counted(patch, differing, [*actual])} differ"
        why = "a base that is quantised, or rounded to another dtype than in training, counts as another"
        raise RefusedBaseError(f"{patch.folder}: {problem}; {why}", "base")


def check_tokenizer_beside(patch: Patch, identity: BaseIdentity) -> None:
    """Raise PatchError if another program left a tokenizer beside its patch that writes prompts in another way."""
    folder = patch.folder
    in_use = identity.tokenizer_folder
    if patch.metadata.get("base") or folder.resolve() == in_use.resolve() or not (folder / TOKENIZER).is_file():
        return
    template = chat_template_digest(folder)
    is_other = identity.template is None and template not in (None, identity.chat_template)
    changed = ["another chat template"] if is_other else []
    more = _added_tokens(folder) - _added_tokens(in_use) if (in_use / TOKENIZER).is_file() else set[str]()
    if more:
        changed.append(f"{count_of(len(more), 'more token')} ({', '.join(sorted(more)[:3])})")
    if changed:
        problem = f"the tokenizer beside the patch has {' and '.join(changed)} than {in_use}"
        raise RefusedBaseError(f"{folder}: {problem}; use it with --tokenizer {folder} (tokenizer=)", "template")


def _added_tokens(folder: Path) -> set[str]:
    """Return the tokens that a tokenizer names beside those of its model."""
    tokens = read_json(folder / TOKENIZER).get("added_tokens")
    entries = tokens if isinstance(tokens, list) else []
    return {str(token.get("content")) for token in entries if isinstance(token, dict)}


def changed_prompting(patch: Patch, identity: BaseIdentity) -> str:
    """Name the prompt settings that differ from training; empty if none is known to."""
    recorded = patch.metadata.get("base") or {}
    used = [part for part in PROMPTING if part != "chat_template" or not trained_form(patch.metadata).raw]
    known = {*recorded, *(["chat_template"] if identity.brought else [])}
    changed = [part for part in used if part in known and recorded.get(part) != getattr(identity, part)]
    return " and other ".join(part.replace("_", " ") for part in changed)


def unverified_note(patch: Patch, base: object) -> str | None:
    """Return a note for the user on a patch without a digest of its base, of which only shapes were compared."""
    if patch.metadata.get("base") is not None:
        return None
    made_for = f", for {patch.config.base_model}" if patch.config.base_model else ""
    names = f"; PEFT ignores names such as {patch.misnamed}, which are read without wrappers" if patch.misnamed else ""
    why = f"{patch.folder} holds no digest of its base (another program wrote it{made_for})"
    return f"note: {why}; only shapes were compared with {base}{names}"


def compared_parts(patch: Patch) -> str:
    """Return the parts of a base that ``check_base`` compares, for a sentence."""
    has_others = bool((patch.metadata.get("base") or {}).get("unadapted"))
    rest = "and samples of all others" if has_others else "alone, as the patch records no others"
    values = "samples" if full_digests(patch) is None else "every value"
    return f"{values} of {len(patch.layers)} adapted weights {rest}"


def full_digests(patch: Patch) -> Mapping[str, str] | None:
    """Return module -> ``full-1`` digest of its base's weight; None if the patch has no such digests."""
    return _full_of(patch.metadata.get("base") or {})


def _full_of(base: Mapping[str, Any]) -> Mapping[str, str] | None:
    full = base.get("full") or {}
    return full.get("weights") if full.get("scheme") == FULL_SCHEME else None


def mismatch(patch: Patch, base: str, differing: str) -> RefusedBaseError:
    """Return the error of a patch on a base that it was not trained on. ``differing``: the parts that do."""
    problem = f"trained on another base than {base}: {differing} differ. It was made for {patch.made_for}"
    return RefusedBaseError(f"{patch.folder}: {problem}", "base")


def base_rounding(base: Mapping[str, Any]) -> str:
    """Return the name of the dtype that the weights of a fingerprint were rounded to before their digests."""
    return base.get("rounded_to") or "float32"


def base_differences(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    where: tuple[str, str] = ("in the first", "in the second"),
    known: Sequence[str] = (),
) -> list[str]:
    """Return the differences between two fingerprints of bases; only parts that both have in one form count.

    where: the words after the values of config keys. known: differences of weights, which are among all matrices too.
    """
    differences = [*known]
    if a.get("scheme") == b.get("scheme") and base_rounding(a) == base_rounding(b):
        tables = [(a.get("weights") or {}, b.get("weights") or {}), (_full_of(a) or {}, _full_of(b) or {})]
        shared = {name for x, y in tables for name in x if name in y}
        wrong = sorted({name for x, y in tables for name in x if name in y and x[name] != y[name]})
        if wrong:
            differences.append(f"the weights of {len(wrong)} of {len(shared)} shared layers ({wrong[0]} first)")
    first, second = a.get("unadapted") or {}, b.get("unadapted") or {}
    changed = {key for key in first.keys() & second.keys() if first[key] != second[key]}
    differences += ["weights that it does not adapt"] if "matrices" in changed and not differences else []
    for key in ("config", "tokenizer", *PROMPTING):
        if a.get(key) and b.get(key) not in (None, a[key]):
            values = a.get("config_values"), b.get("config_values")
            differences.append(_config_difference(*values, where) if key == "config" else key)
    differences += ["embedding, norms or head"] if changed & {"outside", "vectors"} else []
    return differences


def _config_difference(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None, where: tuple[str, str]) -> str:
    """Return ``config``, with the keys that differ and both values if these were recorded."""
    if one is None or two is None:
        return "config"
    sides = flatten(one), flatten(two)
    texts = {key: [repr(side[key]) if key in side else "absent" for side in sides] for key in {*sides[0], *sides[1]}}
    keys = [f"{key}: {a[:60]} {where[0]}, {b[:60]} {where[1]}" for key, (a, b) in sorted(texts.items()) if a != b]
    more = f"; and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return f"config ({'; '.join(keys[:SHOWN_KEYS])}{more})" if keys else "config"


def joint_fingerprint(patches: Sequence[Patch], names: Sequence[str]) -> dict[str, Any] | None:
    """Join fingerprints of one base, rounded alike; None unless all ``names`` are there: a part matches no base."""
    bases = [patch.metadata["base"] for patch in patches]
    weights = {name: base["weights"][name] for base in bases for name in names if name in base["weights"]}
    digests = [full_digests(patch) or {} for patch in patches]
    full = {name: table[name] for table in digests for name in names if name in table}
    if len(weights) < len(names):
        return None
    keys = ("config", "config_values", "tokenizer", "rounded_to", "unadapted", *PROMPTING)
    shared = {key: next((base[key] for base in bases if base.get(key)), None) for key in keys}
    shared = {key: value for key, value in shared.items() if value is not None or any(key in base for base in bases)}
    full_part = {"full": {"scheme": FULL_SCHEME, "weights": full}} if len(full) == len(names) else {}
    return {"scheme": SCHEME, **shared, "weights": weights, **full_part}


def quantization_note(patch: Patch, here: Mapping[str, Any] | None) -> str | None:
    """Return a sentence if the patch was trained with another quantisation of the base than the one here; else None.

    here: the record of the base in use, as patches have it; None: it is not quantised.
    """
    if (recorded := patch.metadata.get("base")) is None:
        return None
    forms = [f"quantised as {one['name']}" if one else "in floats" for one in (recorded.get("quantized"), here)]
    if forms[0] == forms[1]:
        return None
    return f"note: {patch.folder} was trained on a base {forms[0]}, and this one is {forms[1]}; answers differ a little"
