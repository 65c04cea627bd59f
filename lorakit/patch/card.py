"""The model card of a patch: what it is, how it was made, how to use it. Deterministic: no dates, no times."""

import json
from collections.abc import Mapping
from typing import Any


def model_card(name: str, base_model: str | None, facts: Mapping[str, Any]) -> str:
    """README.md of a patch folder, with the front matter the hub reads."""
    adapter, recipe = facts.get("adapter", {}), facts.get("recipe")
    lines = [
        "---",
        f"base_model: {base_model}",
        "library_name: peft",
        "tags: [lora, lorakit]",
        "---",
        "",
        f"# {name}",
        "",
    ]
    lines += [f"A LoRA patch for `{base_model}`, trained with lorakit {facts.get('lorakit')}.", ""]
    lines += [f"- {key}: {value}" for key, value in adapter.items()]
    results = facts.get("results") or {}
    if results:
        lines += ["", "| measure | value |", "|---|---|"]
        lines += [f"| {key} | {value:.4f} |" for key, value in results.items()]
    lines += [
        "", "## Use", "", "```python", "import lorakit", "",
        f'model = lorakit.load("{base_model}", adapters={{"{name}": "path/to/this/folder"}})',
        f'print(model.generate(["..."], adapters=["{name}"])[0])', "```", "",
        f"or `PeftModel.from_pretrained(base, path)`; merge with `lorakit merge {base_model} PATH --out DIR`.",
    ]  # fmt: skip
    if recipe:
        lines += ["", "## Recipe", "", "```json", json.dumps(recipe, indent=1, sort_keys=True), "```"]
    return "\n".join(lines) + "\n"
