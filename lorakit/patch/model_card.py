"""Write the model card of a patch: its settings, its origin and its use. Deterministic: no dates, no times."""

import json
from collections.abc import Mapping
from typing import Any

from lorakit.patch.compatibility import new_token_calls, peft_problems
from lorakit.patch.patch import Patch
from lorakit.patch.prompting import trained_form


def model_card(name: str, patch: Patch, recipe: Mapping[str, Any] | None = None) -> str:
    """Return the README.md of a patch folder, for the hub too. ``recipe``: its keys that differ from the defaults."""
    base_model, metadata = patch.config.base_model, patch.metadata
    front = [
        "---",
        *([f"base_model: {base_model}"] if base_model else []),
        "library_name: peft",
        "tags: [lora, lorakit]",
        "---",
    ]
    made_for = f"for `{base_model}`" if base_model else "for a model that has no name"
    lines = [*front, "", f"# {name}", "", f"A LoRA patch {made_for}, {_origin(metadata)}.", ""]
    lines += [
        f"- {key}: {value:g}" if isinstance(value, float) else f"- {key}: {value}"
        for key, value in _properties(metadata)
    ]
    if results := metadata.get("results"):
        lines += [
            "",
            "| held out | value |",
            "|---|---|",
            *(f"| {key} | {value:.4f} |" for key, value in results.items()),
        ]
    own = metadata.get("recipe", {}).get("base", {}).get("tokenizer")
    tokenizer = f', tokenizer="{own}"' if own else ""
    lines += ["", "## Use", ""]
    if base_model:
        lines += [
            "```python", "import lorakit", "",
            f'model = lorakit.load("{base_model}", adapters={{"{name}": "path/to/this/folder"}}{tokenizer})',
            f'print(model.generate(["..."], adapters=["{name}"])[0])', "```", "",
            f"or `PeftModel.from_pretrained(base, path)`; merge with `lorakit merge {base_model} PATH --out DIR`.",
            *(f"But PEFT computes something else: {problem}." for problem in peft_problems(patch)),
        ]  # fmt: skip
        if tokens := metadata.get("new_tokens"):
            calls = f"For PEFT, first: `{new_token_calls(tokens)}`."
            lines += ["", f"It has tokens that the base lacks; lorakit adds them. {calls}"]
        if notes := trained_form(metadata).notes():
            more = "lorakit writes prompts that are texts so; other programs have to be told."
            lines += ["", *(f"- {note}" for note in notes), "", more]
    else:
        lines += ["`PeftModel.from_pretrained(model, path)` puts it onto the model it was made on."]
    if recipe:
        lines += ["", "## Recipe", "", "```json", json.dumps(recipe, indent=1, sort_keys=True), "```"]
    return "\n".join(lines) + "\n"


def _origin(metadata: Mapping[str, Any]) -> str:
    if "lorakit" not in metadata:
        return "written by another program"
    ways = {"converted": "converted from another format", "combined": "combined from several patches",
            "extracted": "extracted from two full models"}  # fmt: skip
    return f"{next((way for key, way in ways.items() if key in metadata), 'made')} with lorakit {metadata['lorakit']}"


def _properties(metadata: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows = metadata.get("data", {}).get("train", {})
    recipe = metadata.get("recipe", {})
    train = recipe.get("train", {})
    targets = recipe.get("adapter", {}).get("targets")
    facts = [
        ("targets", targets if isinstance(targets, str | None) else ", ".join(targets)),
        ("learning rate", train.get("learning_rate")),
        ("schedule", train.get("schedule")),
        ("batch size", train.get("batch_size")),
        ("steps of the run", train.get("steps")),
        ("epochs", None if not train or train.get("steps") else train.get("epochs") or 1),
        ("started from", metadata.get("start", {}).get("name")),
        ("step", metadata.get("step")),
        ("rows", rows.get("rows")),
        ("label tokens of the rows", rows.get("label_tokens")),
    ]
    return [*metadata.get("adapter", {}).items(), *(pair for pair in facts if pair[1] is not None)]
