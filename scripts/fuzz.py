"""Feed damaged rows, recipes and patches to lorakit: ``python -m scripts.fuzz [CASES]`` (default 5,000 of each).

Two laws: nothing but lorakit's own errors is raised, and what is accepted means what it meant. ``tests/test_fuzz.py``
runs a few cases of each.
"""

import copy
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_skeleton, load_tokenizer
from lorakit.data.encode import Encoder
from lorakit.data.row_files import BadRow
from lorakit.data.row_formats import REMEDIES, SWITCHES, has_value
from lorakit.data.row_settings import RowSettings
from lorakit.errors import LorakitError, RecipeError
from lorakit.patch import BaseShapes, Patch, check_fits, read_patch
from lorakit.patch.patch import SIDECAR, TENSOR_FILE
from lorakit.recipe import load_recipe
from tests.helpers.patches import make_patch

ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
ROWS: Final[list[dict[str, Any]]] = [
    {"messages": [{"role": "system", "content": "Be kind."}, ASKED, ANSWERED, ASKED, ANSWERED]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "system": "Be kind."},
    {"prompt": "hi ", "completion": "yes", "id": 3, "weight": 2},
    {"prompt": [ASKED], "completion": [ANSWERED]},
    {"instruction": "say", "input": "hi", "output": "yes", "source": "x"},
    {"text": "hi yes"},
]
BETTER, WORSE = {"role": "assistant", "content": "yes, gladly"}, {"role": "assistant", "content": "no"}
PAIRS: Final[list[dict[str, Any]]] = [
    {"prompt": [ASKED], "chosen": [BETTER], "rejected": [WORSE]},
    {"prompt": "hi", "chosen": [ASKED, BETTER], "rejected": [ASKED, WORSE], "weight": 2},
    {"messages": [ASKED, ANSWERED, ASKED], "chosen": BETTER, "rejected": WORSE},
    {"instruction": "say", "input": "hi", "chosen": "yes", "rejected": "no"},
    {"chosen": "hi yes gladly", "rejected": "hi no", "id": 3},
]
RECIPE: Final = {
    "base": {"model": "builtin:tiny", "dtype": "bf16"},
    "adapter": {"rank": 4, "targets": ["q_proj"], "dropout": 0.1},
    "data": {"train": "rows.jsonl", "max_tokens": 64},
    "train": {"steps": 3, "batch_size": 2, "learning_rate": 0.001},
    "parallel": {"backend": "single"},
    "objective": {"name": "dpo", "beta": 0.1},
    "output": "out",
}
ANY_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["", "user", "assistant", "yes", "auto", "lora", "x" * 300, -1, 0, 1, 2**70, 1e308, [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
Law = Callable[[st.DataObject], None]


def mutated(data: st.DataObject, value: Any, keys: list[str]) -> Any:
    """Return a copy with one to three parts removed, added or replaced, anywhere. keys: names of parts to add."""
    root = {"": copy.deepcopy(value)}
    for _ in range(data.draw(st.integers(1, 3))):
        parts = list(_parts(root))
        container, key = data.draw(st.sampled_from(parts))
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            container[key] = data.draw(ANY_JSON)
        elif action == "remove" and container is not root:
            del container[key]
        elif action == "add" and isinstance(container, dict) and container is not root:
            container[data.draw(st.sampled_from(keys) | st.text(max_size=8))] = data.draw(ANY_JSON)
    return root[""]


def _parts(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every part of a nested value."""
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, part in list(pairs):
        yield container, key
        if isinstance(part, dict | list):
            yield from _parts(part)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text inside a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def row_law(*, pairs: bool = False) -> Law:
    """Return the law of rows: a row is a BadRow, or its labels are texts that stand in it. A pair has one prompt."""
    tokenizer = load_tokenizer(find_base("builtin:tiny"))
    encoder = Encoder(tokenizer, RowSettings(pairs=pairs))
    keys = [*REMEDIES, *SWITCHES, "role", "content", "tool_calls", "name", "system", "tools", "text", "messages"]

    def law(data: st.DataObject) -> None:
        row = mutated(data, data.draw(st.sampled_from(PAIRS if pairs else ROWS)), keys)
        try:
            rows = encoder(row)
        except BadRow:
            return
        assert not has_value(row.get("label"))
        if pairs:
            prompts = [one.ids[: one.label_mask.index(True)] for one in rows]
            assert prompts == [prompts[0]] * 2
            assert rows[0].ids != rows[1].ids
        said = "".join(_texts(row))
        for encoded in rows:
            assert any(encoded.label_mask[1:])
            assert len(encoded.ids) == len(encoded.label_mask)
            assert encoded.weight >= 0
            for is_label, run in itertools.groupby(range(len(encoded.ids)), encoded.label_mask.__getitem__):
                text = tokenizer.decode([encoded.ids[i] for i in run], skip_special_tokens=True).strip()
                assert not is_label or text in said or "tool_calls" in str(row), (text, row)

    return law


def recipe_law(folder: Path) -> Law:
    """Return the law of recipes: one is a RecipeError, or it is itself once more when it is written and read."""
    keys = ["lr", "rank", "alpha", "packing", "targets", "epochs", "model", "tokenizer", "offload", "quantize"]

    def law(data: st.DataObject) -> None:
        content = mutated(data, RECIPE, keys)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content, allow_unicode=True))
        try:
            recipe = load_recipe(path)
        except RecipeError:
            return
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        assert load_recipe(path) == recipe

    return law


def patch_law(folder: Path) -> Law:
    """Return the law of patches: a patch that was changed is a LorakitError, or is the same adapter."""
    original = make_patch(find_base("builtin:tiny"), folder / "original", rank=2, targets=["q_proj"])
    files = {path.name: path.read_bytes() for path in original.iterdir()}
    expected = meaning(read_patch(original))
    shapes = BaseShapes.of(load_skeleton(find_base("builtin:tiny")))
    changed = folder / "changed"
    changed.mkdir()
    keys = ["use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "r", "lora_alpha", "fan_in_fan_out", "bias"]

    def law(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["adapter_config.json", SIDECAR, TENSOR_FILE]))
        content = files[name]
        if name != TENSOR_FILE and data.draw(st.booleans()):
            content = json.dumps(mutated(data, json.loads(content), keys), default=str).encode()
        else:
            start = data.draw(st.integers(0, len(content) - 1))
            damage = data.draw(st.binary(max_size=4))
            content = content[:start] + damage + content[start + data.draw(st.integers(0, 4)) :]
            content = content[: data.draw(st.sampled_from([None, start, len(content) - 1]))]
        for other, bytes_ in files.items():
            (changed / other).write_bytes(content if other == name else bytes_)
        try:
            patch = read_patch(changed)
            check_fits(patch, shapes, folder)
        except LorakitError:
            return
        assert meaning(patch) == expected, name

    return law


def meaning(patch: Patch) -> Any:
    """Return everything of a patch that decides what its adapter computes, for comparison."""
    layers = {
        name: (layer.method, layer.rank, layer.alpha, layer.sizes, layer.embedding, layer.num_experts, tuple(
            (key, tensor.dtype, tensor.tolist()) for key, tensor in sorted(layer.tensors.items())
        ))
        for name, layer in patch.layers.items()
    }  # fmt: skip
    full = {name: tensor.tolist() for name, tensor in patch.full_tensors.items()}
    return layers, full, {name: (rows.tokens, rows.tensor.tolist()) for name, rows in patch.token_rows.items()}


def run(law: Law, cases: int) -> None:
    """Run a law on random cases; hypothesis prints the smallest one that breaks it."""

    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test(data: st.DataObject) -> None:
        law(data)

    test()


def main() -> None:
    """Run all laws."""
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        laws = {
            "rows": row_law(),
            "pairs": row_law(pairs=True),
            "recipes": recipe_law(Path(folder)),
            "patches": patch_law(Path(folder)),
        }
        for name, law in laws.items():
            run(law, cases)
            print(f"{name}: {cases:,} cases")


if __name__ == "__main__":
    main()
