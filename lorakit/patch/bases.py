"""Were patches made for the same base, and what do they say about it together?"""

from collections.abc import Sequence
from typing import Any

from lorakit.patch.fingerprint import FULL_SCHEME, SCHEME, full_digests
from lorakit.patch.patch import Patch


def comparable(one: Patch, two: Patch) -> bool:
    """Whether the digests of both are of values rounded alike; they are of float32 values in any case."""
    return rounding(one) == rounding(two)


def rounding(patch: Patch) -> str:
    """What the base's weights were rounded to before they were digested."""
    return patch.metadata["base"].get("rounded_to") or "float32"


def base_differences(one: Patch, two: Patch) -> list[str]:
    """What differs between the bases of two patches that both know theirs; nothing that cannot be compared."""
    a, b = one.metadata["base"], two.metadata["base"]
    found = []
    if comparable(one, two):
        tables = [(a["weights"], b["weights"]), (full_digests(one) or {}, full_digests(two) or {})]
        shared = {name for x, y in tables for name in x if name in y}
        wrong = sorted({name for x, y in tables for name in x if name in y and x[name] != y[name]})
        if wrong:
            found.append(f"the weights of {len(wrong)} of {len(shared)} shared layers ({wrong[0]} first)")
    return found + [key for key in ("config", "tokenizer") if a.get(key) and b.get(key) not in (None, a[key])]


def joint_fingerprint(patches: Sequence[Patch], names: Sequence[str]) -> dict[str, Any] | None:
    """One fingerprint of the base for all of ``names``, or None: a part of one would match no base.

    The patches know the same base, rounded alike.
    """
    told = [patch.metadata["base"] for patch in patches]
    weights, full = (
        {name: table[name] for table in tables for name in names if name in table}
        for tables in ([one["weights"] for one in told], [full_digests(patch) or {} for patch in patches])
    )
    if len(weights) < len(names):
        return None
    base = {key: next((x[key] for x in told if x.get(key)), None) for key in ("config", "tokenizer", "rounded_to")}
    whole = {"full": {"scheme": FULL_SCHEME, "weights": full}} if len(full) == len(names) else {}
    return {"scheme": SCHEME, **base, "weights": weights, **whole}
