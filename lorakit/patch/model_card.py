"""Write the model card of a patch: its settings, its origin and its use. Deterministic: no dates, no times."""

import json
from collections.abc import Mapping
from typing import Any, Final

from lorakit.patch.compatibility import new_token_calls, peft_problems
from lorakit.patch.own_head import own_head
from lorakit.patch.patch import Patch
from lorakit.patch.prompting import ASSETS, trained_form

TEMPLATE: Final = ASSETS / "model_card.md"


def model_card(name: str, patch: Patch, recipe: Mapping[str, Any] | None = None) -> str:
    """Return the README.md of a patch folder, for the hub too. ``recipe``: its keys that differ from the defaults."""
    import jinja2

    metadata = patch.metadata
    head = own_head(patch)
    ways = {"converted": "converted from another format", "combined": "combined from several patches",
            "extracted": "extracted from two full models"}  # fmt: skip
    way = next((way for key, way in ways.items() if key in metadata), "made")
    origin = f"{way} with lorakit {metadata['lorakit']}" if "lorakit" in metadata else "written by another program"
    rows = metadata.get("data", {}).get("train", {})
    settings = metadata.get("recipe", {})
    train = settings.get("train", {})
    targets = settings.get("adapter", {}).get("targets")
    updates = patch.layers.values()
    facts = {
        "layers": len(updates) or None,
        "method": patch.config.method if updates else None,
        "rank": ", ".join(map(str, sorted({one.rank for one in updates}))) or None,
        "alpha": ", ".join(f"{alpha:g}" for alpha in sorted({one.alpha for one in updates})) or None,
        **metadata.get("adapter", {}),
        "labels": ", ".join(head.labels) if head and head.labels else None,
        "targets": targets if isinstance(targets, str | None) else ", ".join(targets),
        "learning rate": train.get("learning_rate"),
        "schedule": train.get("schedule"),
        "batch size": train.get("batch_size"),
        "steps of the run": train.get("steps"),
        "epochs": None if not train or train.get("steps") else train.get("epochs") or 1,
        "started from": metadata.get("start", {}).get("name"),
        "step": metadata.get("step"),
        "pairs" if rows.get("pairs") else "rows": rows.get("pairs") or rows.get("rows"),
        "label tokens of the rows": rows.get("label_tokens"),
    }
    # a block's own line is no line of the card
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        name=name,
        base_model=patch.config.base_model,
        origin=origin,
        properties=[pair for pair in facts.items() if pair[1] is not None],
        results=metadata.get("results"),
        call="generate" if head is None else "classify" if head.labels else "reward",
        values=None if head is None else head.num_values,
        tokenizer=settings.get("base", {}).get("tokenizer"),
        peft_problems=list(peft_problems(patch)),
        new_token_calls=new_token_calls(patch.new_tokens) if patch.new_tokens else None,
        notes=trained_form(metadata).notes() if head is None else [],
        recipe=json.dumps(recipe, indent=1, sort_keys=True) if recipe else None,
    )
