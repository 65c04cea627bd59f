"""Combine patches into one, a layer at a time: their exact sum, that sum at a smaller rank, or TIES and DARE.

The new patch equals the requested combination up to the error that it reports and stores, or it is not written.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final, Literal

from lorakit.base.transformers_io import tokenizer_files
from lorakit.errors import MergeError, PatchError, check_absent, did_you_mean
from lorakit.files.atomic import digest
from lorakit.files.text import Say, columns, say_lines
from lorakit.lora.low_rank import LowRankFit, relative_error, sparsified, sum_low_rank
from lorakit.patch import Patch, PatchLayer, new_patch, write_new_patch
from lorakit.patch.find import WeightedPatch, open_weighted
from lorakit.patch.fingerprint import SCHEME
from lorakit.patch.own_head import has_own_head
from lorakit.patch.patch import MAX_RANK, TENSOR_FILE, check_plain, low_rank_layer
from lorakit.patch.same_base import Allow, base_differences, base_rounding, joint_fingerprint
from lorakit.version import VERSION

How = Literal["sum", "ties", "dare"]
DENSITIES: Final[Mapping[str, float | None]] = {"sum": None, "ties": 0.2, "dare": 0.5}
"""way to combine -> default share of entries that are not dropped; None: all"""
SHOWN_LAYERS: Final = 5
Parts = list[tuple[PatchLayer, float]]  # the summands of one layer: (a source's layer, the factor w s of its B A)


def combine(
    *adapters: str | Path | tuple[str | Path, float],
    out: str | Path,
    how: How = "sum",
    rank: int | None = None,
    density: float | None = None,
    seed: int = 0,
    allow: Collection[Allow] = (),
    say: Say = lambda text: None,
) -> Path:
    """Write several patches of one base as one; returns ``out``. An adapter may be given as (folder, weight).

    ``sum``: delta = sum_i w_i s_i B_i A_i exactly, by concatenating ranks; with ``rank``, the nearest of that rank.
    ``ties`` and ``dare``: as in ``lora.low_rank``, on the dense deltas w_i s_i B_i A_i of one layer at a time. Dense
    deltas avoid the cross terms of combining A and B separately. The result is truncated to ``rank``, or to the sum of
    the sources' ranks. No layer's rank exceeds its smaller side.
    ``density``: share of entries that are not dropped, by default 0.2 for ties and 0.5 for dare.
    ``seed``: for the entries that dare drops in each layer, and for the SVD of large layers. The same call writes the
    same bytes. Full tensors (a saved head, biases) are copied if only one patch has them, with weight 1.

    Raises MergeError: an argument is impossible. PatchError: a patch is damaged, or two are of different bases
    (``allow={"base"}`` records this instead). Nothing is written then.
    """
    if how not in DENSITIES:
        raise MergeError(f"how: one of {', '.join(DENSITIES)}, got {how!r}.{did_you_mean(how, DENSITIES)}")
    if how == "sum" and density is not None:
        raise MergeError(f"density: {density}, but a sum keeps every entry; leave it out, or say ties or dare")
    if density is not None and not 0 < density <= 1:
        raise MergeError(f"density: the share of entries to keep, above 0 and at most 1, got {density}")
    if rank is not None and rank < 1:
        raise MergeError(f"rank: a whole number from 1, got {rank}")
    density = DENSITIES[how] if density is None else density
    check_absent(out, "out", MergeError)
    sources = _sources(adapters, rank)
    differing, unknown = _compare_bases(sources)
    if differing and "base" not in allow:
        way_out = "to combine them all the same, pass --allow base (in Python allow={'base'})"
        raise PatchError("\n".join([*differing, way_out]))
    say_lines(say, [*differing, *unknown])
    if rank is None and how != "sum":
        say("rank: not given; every layer gets the ranks of its sources together, at most its smaller side")
    parts: dict[str, Parts] = {}
    for one in sources:
        for name, layer in one.patch.layers.items() if one.weight else ():
            parts.setdefault(name, []).append((layer, one.weight * layer.scale))
    combined = _combine(parts, _ranks(parts, how, rank), how, density, seed, say)
    record: dict[str, Any] = {
        "how": how, "rank": rank, "density": density, "seed": seed, "error": relative_error(*combined.values()),
        "errors": {name: relative_error(one) for name, one in combined.items()},
        "sources": [
            {"name": one.folder.name, "sha256": digest(one.folder / TENSOR_FILE), "weight": one.weight}
            for one in sources
        ],
        "allow": sorted(allow), "bases_differ": differing, "bases_not_compared": unknown,
    }  # fmt: skip
    layers = {name: low_rank_layer(one, embedding=parts[name][0][0].embedding) for name, one in combined.items()}
    holder = next((one.folder for one in sources if one.patch.full_shapes), None)
    tokenizer = [] if holder is None else tokenizer_files(holder)
    return write_new_patch(out, _patch(sources, layers, record, say), beside=tokenizer)


def _sources(adapters: Sequence[str | Path | tuple[str | Path, float]], rank: int | None) -> list[WeightedPatch]:
    """Open the patches and check that they can be combined with each other."""
    sources = open_weighted(adapters)
    if not sources or (len(sources) == 1 and rank is None):
        raise MergeError(f"{len(sources)} patches: name two or more, or one with the rank it is to be brought down to")
    for one in sources:
        check_plain(one.patch, "combining")
    for one, two in combinations(sources, 2):
        if one.patch.digest == two.patch.digest:
            raise MergeError(f"{one.folder} and {two.folder} are one patch; name it once, with the sum of the weights")
        for name, layer in one.patch.layers.items():
            both = (layer, two.patch.layers.get(name, layer))
            a, b = (f"{'an embedding' if x.embedding else 'linear'}, {x.sizes} (out, in)" for x in both)
            if a != b:
                raise PatchError(f"made for different bases: {name} is {a} in {one.folder}, {b} in {two.folder}")
    with_full_tensors = [one for one in sources if one.patch.full_shapes]
    for one in with_full_tensors:
        if has_own_head(one.patch):
            raise PatchError(f"{one.folder}: has a head of its own, for its own updates alone; serve it as it is")
        if len(with_full_tensors) > 1 or one.weight != 1.0:
            names = ", ".join([*one.patch.full_shapes][:3])
            remedy = "One patch may, with weight 1; weighing them needs the base: lorakit merge"
            raise MergeError(f"{one.folder}: brings full tensors ({names}) in place of the base's. {remedy}")
    return sources


def _compare_bases(sources: Sequence[WeightedPatch]) -> tuple[list[str], list[str]]:
    """Return sentences: (differences between the bases of two patches, bases that could not be compared)."""
    differing = []
    unknown = []
    for one in sources:
        scheme = (one.patch.metadata.get("base") or {}).get("scheme")
        if scheme is None:
            unknown.append(f"{one.folder}: does not say which base it is for; compared by its shapes alone")
        elif scheme != SCHEME:
            raise PatchError(f"{one.folder}: base fingerprint of an unknown scheme {scheme!r}; update lorakit")
    for one, two in combinations([one for one in sources if one.patch.metadata.get("base")], 2):
        first, second = (each.patch.metadata["base"] for each in (one, two))
        parts = base_differences(first, second)
        pair = f"{one.folder} and {two.folder}"
        if parts:
            differing.append(f"{pair} were made for different bases: {' and '.join(parts)} differ")
        elif base_rounding(first) != base_rounding(second):
            dtypes = " and ".join(sorted((base_rounding(first), base_rounding(second))))
            unknown.append(f"{pair}: the digests of their bases' weights are of {dtypes}, so they do not compare")
    return differing, unknown


def _ranks(parts: Mapping[str, Parts], how: str, rank: int | None) -> dict[str, int]:
    """Return module -> largest rank of its result, for a ``rank`` that a layer can use and a patch may hold."""
    ranks = {}
    most = 0
    for name, own in parts.items():
        total = sum(layer.rank for layer, _ in own)
        smaller_side = min(own[0][0].sizes)
        ranks[name] = total if how == "sum" and rank is None else min(rank or total, smaller_side)
        most = max(most, total if how == "sum" else smaller_side)
    if rank is not None and rank > most:
        raise MergeError(f"rank: {rank}, but no layer can use more than {most}; give less, or leave it out")
    if (largest := max(ranks.values(), default=0)) > MAX_RANK:
        raise MergeError(f"rank: {largest} in a layer, and a patch holds at most {MAX_RANK}; give a smaller rank")
    return ranks


def _combine(
    parts: Mapping[str, Parts], ranks: Mapping[str, int], how: str, density: float | None, seed: int, say: Say
) -> dict[str, LowRankFit]:
    combined = {}
    for name, own in parts.items():
        terms = [(dict(layer.tensors), factor) for layer, factor in own]
        key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
        one = sum_low_rank(terms, ranks[name]) if density is None else sparsified(terms, how, ranks[name], density, key)
        combined[name] = one
    if not any(one.factors.A.any() and one.factors.B.any() for one in combined.values()):
        raise MergeError("nothing would change: every combined update is zero; look at the patches and their weights")
    largest = max(one.factors.rank for one in combined.values())
    error = relative_error(*combined.values())
    if not error:
        say(f"{len(combined)} layers, ranks up to {largest}, exact")
        return combined
    wanted = "sum of the patches" if how == "sum" else f"{how} of their full updates"
    say(f"{len(combined)} layers, ranks up to {largest}; {error:.1%} off the {wanted} (a higher --rank comes closer)")
    say_worst(combined, say)
    return combined


def say_worst(fits: Mapping[str, LowRankFit], say: Say) -> None:
    """Print the layers with the largest relative errors, most first."""
    worst = sorted(fits.items(), key=lambda item: -relative_error(item[1]))[:SHOWN_LAYERS]
    rows = [(name, str(one.factors.rank), f"{relative_error(one):.1%}") for name, one in worst]
    say_lines(say, columns([("most in", "rank", "off by"), *rows], "<>>"))


def _patch(
    sources: Sequence[WeightedPatch], layers: Mapping[str, PatchLayer], record: Mapping[str, Any], say: Say
) -> Patch:
    configs = [one.patch.config for one in sources]
    named = next((config for config in configs if config.base_model), configs[0])
    groups: dict[str, list[Patch]] = {}  # of sources whose fingerprints join
    for one in sources:
        if one.patch.metadata.get("base"):
            group = str(one.index) if record["bases_differ"] else base_rounding(one.patch.metadata["base"])
            groups.setdefault(group, []).append(one.patch)
    base = next(filter(None, (joint_fingerprint(patches, list(layers)) for patches in groups.values())), None)
    if base is None:
        say("the new patch does not say which base it is for: no source does so for all of its layers")
    tasks = {config.raw.get("task_type") for config in configs}
    adapter = {record["how"]: " + ".join(f"{x.weight:g} {x.folder.name}" for x in sources)}
    holder = next((one.patch for one in sources if one.patch.full_shapes), None)
    return new_patch(
        layers,
        metadata={"lorakit": VERSION, "adapter": adapter, "combined": record} | ({"base": base} if base else {}),
        base_model=named.base_model,
        revision=named.revision,
        full_tensors=holder.full_tensors if holder else None,
        task_type=tasks.pop() if len(tasks) == 1 else None,
        fan_in_fan_out=all(config.raw.get("fan_in_fan_out") for config in configs),
        tied=holder is not None and bool(holder.config.raw.get("ensure_weight_tying")),
    )
