"""Whole runs on a pretended GPU: the numbers of the CPU, no tensor left behind, and few waits for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lorakit
from lorakit.errors import TemporaryFailure
from lorakit.patch import read_patch
from lorakit.run.metrics import read_metrics
from tests.helpers import pretend_gpu
from tests.helpers.pretend_gpu import GPU, OnGpu
from tests.helpers.training import stop_at, train

STEPS = 4
RECIPES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"adapter": {"method": "dora", "dropout": 0.0}},
    "dora with dropout": {"adapter": {"method": "dora"}},
    "pissa": {"adapter": {"init": "pissa"}},
    "the head in full": {"adapter": {"modules_to_save": ["lm_head"]}},
    "padded": {"data": {"packing": False}},
    "recomputed layers": {"train": {"activation_checkpointing": "layers"}},
    "no clipping": {"train": {"max_grad_norm": None}},
}
ONCE = ("lora", "dora with dropout")
KINDS = [kind if kind in ONCE else pytest.param(kind, marks=pytest.mark.matrix) for kind in RECIPES]


def run(recipe: Callable[..., Path], folder: Path, **sections: Any) -> dict[str, Any]:
    """Train, and return losses, metrics and the patch's tensors."""
    settings = {"steps": STEPS, "save_every_steps": 2, "eval_every_steps": 2, "warmup_steps": 0}
    sections["train"] = settings | sections.get("train", {})
    out, _ = train(recipe(f"{folder.name}.yaml", output=str(folder), **sections))
    lines = read_metrics(out / "metrics.jsonl")
    return {
        "numbers": [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines],
        "tensors": {f"{n}.{k}": t for n, one in read_patch(out).layers.items() for k, t in one.tensors.items()},
    }


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for one, other in zip(result["numbers"], expected["numbers"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert result["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert (result["tensors"][name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-9, name


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_the_gpu_is_that_on_the_cpu(kind: str, recipe: Any, tmp_path: Path) -> None:
    expected = run(recipe, tmp_path / "cpu", **RECIPES[kind])
    with pretend_gpu.pretend_gpu():
        result = run(recipe, tmp_path / "gpu", **RECIPES[kind])
    assert_same(result, expected)


@pytest.mark.matrix
def test_trainable_tokens_are_found_on_the_gpu(recipe: Any, tmp_path: Path, tokenizer: Any) -> None:
    tokens = {"adapter": {"trainable_tokens": tokenizer("say so", add_special_tokens=False).input_ids[:1]}}
    expected = run(recipe, tmp_path / "cpu", **tokens)
    with pretend_gpu.pretend_gpu():
        result = run(recipe, tmp_path / "gpu", **tokens)
    assert_same(result, expected)


def test_a_resumed_run_has_its_optimizer_on_the_gpu(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(recipe, tmp_path / "cpu")
    with pretend_gpu.pretend_gpu():
        with monkeypatch.context() as patch:
            stop_at(patch, {2})
            with pytest.raises(TemporaryFailure):
                run(recipe, tmp_path / "gpu")
        result = run(recipe, tmp_path / "gpu")  # the pretended fused AdamW refuses a step count on the CPU
    assert_same(result, expected)


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_step_waits_for_the_gpu_twice_and_twice_for_each_micro_batch(
    packing: bool, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorakit.parallel.single import SingleEngine

    waits: list[int] = []
    step = SingleEngine.step

    def counted(engine: Any, index: int, micro_batches: Any) -> Any:
        pretend_gpu.SYNCS.clear()
        report = step(engine, index, micro_batches)
        waits.append(pretend_gpu.SYNCS.total())
        assert pretend_gpu.SYNCS.total() <= 2 + 2 * len(micro_batches), pretend_gpu.SYNCS
        return report

    monkeypatch.setattr(SingleEngine, "step", counted)
    with pretend_gpu.pretend_gpu():
        run(recipe, tmp_path / "gpu", data={"packing": packing})
    assert len(waits) == STEPS


@pytest.mark.matrix
def test_served_adapters_answer_the_same_and_add_no_wait(recipe: Any, base: Path, tmp_path: Path) -> None:
    run(recipe, tmp_path / "a")
    run(recipe, tmp_path / "b", adapter={"method": "dora", "dropout": 0.0})
    adapters, prompts = {name: tmp_path / name for name in "ab"}, ["say", "what is 3", "so", "and"]
    names = ["a", "b", None, "a"]
    expected = lorakit.load(base, adapters, dtype="float32").generate(prompts, names, max_new_tokens=5)
    with pretend_gpu.pretend_gpu():
        model = lorakit.load(base, adapters, dtype="float32")
        assert model.generate(prompts, names, max_new_tokens=5) == expected
        ids = torch.arange(3, 7)[:, None].to(GPU)
        for _ in range(2):
            pretend_gpu.SYNCS.clear()
            pretend_gpu.COPIES.clear()
            logits = model(ids, adapters=names).logits
        assert isinstance(logits, OnGpu)
        ours = {place for place in (pretend_gpu.SYNCS + pretend_gpu.COPIES) if " lorakit/" in place}
        assert not ours
