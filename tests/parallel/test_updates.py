"""Optimizers, schedules, noise and smoothed labels: each is what its library or paper says, and resumes to the bit."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lorakit.base.transformers_io import load_base
from lorakit.cli import main
from lorakit.data.sampler import collate
from lorakit.errors import RecipeError, RunError, TemporaryFailure
from lorakit.lora import inject
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.ops.dropout import add_embedding_noise, use_token_keys
from lorakit.parallel import Engine, StepSettings, open_engine
from lorakit.parallel.adapter_state import build_optimizer, set_rate
from lorakit.parallel.engine import dropout_keys
from lorakit.patch import read_patch
from lorakit.recipe import ParallelSection, Recipe, TrainSection, load_recipe
from lorakit.recipe.schema import count_warmup_steps
from lorakit.training.learning_rate import rate_note, rate_of
from tests.helpers.training import stop_at, train

CPU = torch.device("cpu")
SHAPES = {"q.lora_A": (4, 24), "q.lora_B": (40, 4)}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.8, weight_decay=0.1),
    "muon": partial(torch.optim.Muon, momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    "adafactor": partial(torch.optim.Adafactor, weight_decay=0.1, eps=(None, 1.0)),
}


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2."""

    def __init__(self, tensors: Any, lr: float) -> None:
        super().__init__(tensors, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for tensor in self.param_groups[0]["params"]:
            m = self.state[tensor].setdefault("m", torch.zeros_like(tensor))
            tensor.mul_(1 - self.param_groups[0]["lr"] * 0.1)
            tensor.sub_(self.param_groups[0]["lr"] * (0.8 * m + 0.2 * tensor.grad).sign())
            m.mul_(0.99).add_(0.01 * tensor.grad)


def engine_of(base: Path, optimizer: str = "adamw", alpha: float | None = None, smoothing: float = 0.0) -> Engine:
    model = inject(load_base(base, torch.float32, CPU), rank=3)
    if alpha is not None:
        add_embedding_noise(model, alpha)
    # unchecked, because a recipe refuses a beta that its optimizer does not read
    train = TrainSection.model_construct(optimizer=optimizer, beta2=0.99, weight_decay=0.01, loraplus_lr_ratio=2.0)
    engine = open_engine(ParallelSection())
    engine.prepare(
        LossModel(model, label_smoothing=smoothing),
        partial(build_optimizer, train),
        StepSettings(0, 1.0, lambda step: 0.01),
    )
    return engine


@pytest.mark.parametrize("name", [*OPTIMIZERS, "lion"])
def test_an_optimizer_updates_as_its_librarys_own(name: str) -> None:
    torch.manual_seed(0)
    tensors = {key: nn.Parameter(torch.randn(shape)) for key, shape in SHAPES.items()}
    copies = [nn.Parameter(tensor.detach().clone()) for tensor in tensors.values()]
    train = TrainSection.model_construct(optimizer=name, beta1=0.8, beta2=0.99, weight_decay=0.1)
    optimizer = build_optimizer(train, tensors)
    library = OPTIMIZERS.get(name, Lion)(copies, lr=0.02)
    set_rate(optimizer.param_groups, 0.02)
    for _ in range(4):
        for tensor, copy in zip(tensors.values(), copies, strict=True):
            copy.grad = torch.randn_like(copy)
            tensor.grad = copy.grad.clone()
        optimizer.step()
        library.step()

    for tensor, copy in zip(tensors.values(), copies, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=1e-6 if name == "lion" else 0, atol=0)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "lion"])
def test_every_optimizer_goes_on_to_the_same_bytes(name: str, base: Path, batches: Any) -> None:
    without_stop, before, after = (engine_of(base, name) for _ in range(3))
    for step in range(4):
        without_stop.step(step, batches(4).step(step))
    for step in range(2):
        before.step(step, batches(4).step(step))
    after.load_state_dict(before.state_dict())
    for step in range(2, 4):
        after.step(step, batches(4).step(step))

    expected = without_stop.state_dict()
    state = after.state_dict()
    assert len(state.optimizer) >= len(state.adapter)
    for part in ("adapter", "optimizer"):
        for key, tensor in getattr(expected, part).items():
            assert torch.equal(getattr(state, part)[key], tensor), key


def test_adafactor_moves_a_tensor_of_zeros_by_the_learning_rate() -> None:
    tensors = {"q.lora_B": nn.Parameter(torch.zeros(40, 4))}
    optimizer = build_optimizer(TrainSection(optimizer="adafactor"), tensors)
    set_rate(optimizer.param_groups, 0.01)
    tensors["q.lora_B"].grad = torch.randn(40, 4)
    optimizer.step()

    assert float(tensors["q.lora_B"].detach().square().mean().sqrt()) == pytest.approx(0.01, rel=0.2)


def test_muon_is_refused_for_tensors_that_are_no_factors() -> None:
    tensors = {"q.lora_A": nn.Parameter(torch.zeros(4, 8)), "q.magnitude": nn.Parameter(torch.zeros(8))}
    with pytest.raises(RunError, match=r"muon .*; 1 other tensors learn here, q.magnitude \(8,\) first. Use adamw"):
        build_optimizer(TrainSection(optimizer="muon"), tensors)


@pytest.mark.parametrize(
    ("schedule", "half", "settings"),
    [
        ("cosine", 1.1, {}), ("linear", 1.1, {}), ("polynomial", 0.2 + 1.8 / 4, {}),
        ("polynomial", 0.2 + 1.8 / 8, {"schedule_power": 3.0}), ("wsd", 2.0, {}), ("wsd", 1.1, {"decay_ratio": 1.0}),
        ("cosine", 2.0, {"schedule_cycles": 2}), ("constant", 2.0, {}),
    ],
)  # fmt: skip
def test_the_learning_rate_rises_over_the_warm_up_and_follows_its_schedule(
    schedule: str, half: float, settings: dict[str, Any]
) -> None:
    train = {"learning_rate": 2.0, "min_learning_rate": 0.2 * (schedule != "constant"), "schedule": schedule}
    sections = {"base": {"model": "m"}, "data": {"train": "t"}, "train": train | {"warmup_steps": 4} | settings}
    rate = rate_of(Recipe.model_validate({**sections, "output": "o"}), 24)
    rates = [rate(step) for step in range(25)]

    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[14] == pytest.approx(half)
    assert rates[24] == pytest.approx(2.0 if schedule == "constant" else 0.2)
    if "schedule_cycles" in settings:
        assert rates[13] < 0.3  # the end of the first cycle
    elif schedule == "wsd" and not settings:
        assert [rates[20], rates[22]] == pytest.approx([2.0, 1.1])
    else:
        assert rates[4:] == sorted(rates[4:], reverse=True)


def recipe_of(folder: Path, train: str, parallel: str = "{}") -> Recipe:
    path = folder / "r.yaml"
    path.write_text(
        f"base: {{model: b}}\ndata: {{train: t}}\ntrain: {train}\nparallel: {parallel}\noutput: o\n", encoding="utf-8"
    )
    return load_recipe(path)


def test_a_recipes_keys_reach_the_schedule(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path,
        "{schedule: cosine, schedule_cycles: 2, warmup_ratio: 0.2, learning_rate: 1.0, min_learning_rate: 0.5}",
    )
    assert count_warmup_steps(recipe, 25) == 5
    rate = rate_of(recipe, 25)
    assert [rate(0), rate(5), rate(15), rate(25)] == pytest.approx([0.2, 1.0, 1.0, 0.5])
    assert 0.5 < rate(14) < 0.52


def test_optimizers_have_defaults_of_their_own_and_any_number_may_be_given(tmp_path: Path) -> None:
    for keys, betas in (
        ("{optimizer: lion}", (0.9, 0.99)), ("{optimizer: lion, beta2: 0.999}", (0.9, 0.999)),
        ("{optimizer: muon}", (0.95, 0.999)), ("{optimizer: sgd}", (0.9, 0.999)), ("{log_to: [wandb]}", (0.9, 0.999)),
    ):  # fmt: skip
        section = recipe_of(tmp_path, keys).train
        assert (section.beta1, section.beta2) == betas


@pytest.mark.parametrize(
    ("train", "parallel", "message"),
    [
        ("{optimizer: sgd, beta2: 0.5}", "{}", "beta2: sgd does not read it; leave it out"),
        ("{optimizer: adafactor, epsilon: 0.5}", "{}", "epsilon: adafactor does not read it"),
        ("{schedule: linear, schedule_cycles: 2}", "{}", "schedule_cycles: goes with schedule cosine, got linear"),
        ("{schedule_power: 1.5}", "{}", "schedule_power: goes with schedule polynomial, got cosine"),
        ("{decay_ratio: 0.5}", "{}", "decay_ratio: goes with schedule wsd, got cosine"),
        ("{schedule: constant, min_learning_rate: 1e-5}", "{}", "min_learning_rate: goes with schedule cosine or"),
        ("{min_learning_rate: 2e-3}", "{}", "min_learning_rate: 0.002 is not below learning_rate 0.001"),
        ("{warmup_ratio: 0.1, warmup_steps: 3}", "{}", "give `warmup_steps` or `warmup_ratio`, not both"),
        ("{optimizer: muon}", "{backend: fsdp2}", "train.optimizer: muon goes with backend single or ddp, got fsdp2"),
        (
            "{optimizer: lion}",
            "{backend: zero2}",
            "lion goes with backend single or ddp, got zero2; adamw goes with every",
        ),
        ("{optimizer: sgd}", "{backend: zero3}", "sgd goes with backend single, ddp or fsdp2, got zero3"),
        ("{optim: sgd}", "{}", "train.optim: unknown key. Nearest: 'optimizer'."),
    ],
)
def test_what_contradicts_itself_in_an_update_is_refused(
    tmp_path: Path, train: str, parallel: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_of(tmp_path, train, parallel)


def test_noise_and_smoothed_labels_are_the_same_however_a_step_is_cut(base: Path, batches: Any) -> None:
    losses = {}
    for cut in ((8, True), (3, True), (2, False)):
        engine = engine_of(base, alpha=5.0, smoothing=0.2)
        losses[cut] = [engine.step(step, batches(*cut).step(step)).loss for step in range(3)]
    plain, noisy = engine_of(base), engine_of(base, alpha=5.0)
    first = batches(8).step(0)

    assert losses[3, True] == pytest.approx(losses[8, True], rel=1e-5)
    assert losses[2, False] == pytest.approx(losses[8, True], rel=1e-5)
    assert abs(noisy.step(0, first).loss - plain.step(0, first).loss) > 1e-4


def test_held_out_rows_have_neither_noise_nor_smoothed_labels(base: Path, batches: Any) -> None:
    plain, changed = (engine_of(base, **settings) for settings in ({}, {"alpha": 50.0, "smoothing": 0.2}))
    held_out = [engine.evaluate(batches(4).step(0), lambda: False) for engine in (plain, changed)]

    assert held_out[0] == held_out[1]


def test_noise_is_uniform_up_to_its_limit_and_other_in_each_step_and_row(base: Path, batches: Any) -> None:
    model = load_base(base, torch.float32, CPU).train().requires_grad_(False)
    embedding = model.get_input_embeddings()
    rows = batches(4).rows
    batch = collate(rows, [0, 1], packing=True)
    plain = embedding(batch.input_ids)
    add_embedding_noise(model, 5.0)

    def noise(step: int) -> torch.Tensor:
        with use_token_keys(dropout_keys(batch, 0, step)):
            return (embedding(batch.input_ids) - plain)[0]

    noises = noise(0).split(batch.row_lengths)
    for part in noises:
        limit = 5.0 / part.numel() ** 0.5
        assert 0.97 * limit < float(part.abs().max()) <= limit * (1 + 1e-5)
        assert float(part.mean()) == pytest.approx(0, abs=5 * limit / (3 * part.numel()) ** 0.5)
        assert float(part.square().mean()) == pytest.approx(limit**2 / 3, rel=0.1)
    assert torch.equal(noise(0), noise(0))
    width = min(batch.row_lengths)
    for other in (noise(1)[:width], noises[1][:width]):
        assert abs(float((noises[0][:width] * other).mean())) < 0.1 * float(noises[0].abs().max() * other.abs().max())
    assert torch.equal(embedding(batch.input_ids), plain)  # not in a micro-batch of an engine
    model.eval()
    assert torch.count_nonzero(noise(0)) == 0


def test_a_smoothed_loss_is_torchs(base: Path, batches: Any) -> None:
    batch = batches(4).step(0)[0]
    results = []
    for chunked in (True, False):
        model = inject(load_base(base, torch.float32, CPU), rank=3)
        loss_model = LossModel(model, label_smoothing=0.3).train()
        assert loss_model.chunked
        loss_model.chunked = chunked  # else torch's own function over the model's logits
        tensors = [tensor for tensor in model.parameters() if tensor.requires_grad]
        loss = token_scores(loss_model, batch.to(CPU)).losses.sum()
        results.append((loss, torch.autograd.grad(loss, tensors, allow_unused=True)))

    (one, gradients), (other, expected) = results
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert sum(gradient is not None for gradient in gradients)
    for gradient, plain in zip(gradients, expected, strict=True):
        assert (gradient - plain).norm() <= 3e-5 * plain.norm() + 1e-9


def test_a_rate_outside_of_what_is_usual_for_its_method_is_noted(tmp_path: Path) -> None:
    def note(train: str, num_parameters: int = 1_000_000_000) -> str | None:
        return rate_note(recipe_of(tmp_path, train), num_parameters)

    assert note("{learning_rate: 2e-5}") == (
        "learning_rate 2e-05 is lower than usual, as if all weights were trained: with adamw, adapters mostly learn at"
        " 5e-05 to 0.001"
    )
    assert "higher than usual: with lion" in str(note("{optimizer: lion, learning_rate: 1e-3}"))
    for keys in ("{learning_rate: 2e-4}", "{optimizer: lion, learning_rate: 2e-5}", "{optimizer: sgd}"):
        assert note(keys) is None
    assert note("{learning_rate: 1e-2}", num_parameters=3_000_000) is None


def test_check_prints_the_note(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lorakit.training.learning_rate.SMALL_BASE", 1)
    assert main(["check", str(recipe())]) == 0
    assert "note       learning_rate 0.01 is higher than usual" in capsys.readouterr().out


def test_check_and_train_refuse_muon_beside_magnitudes(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(adapter={"method": "dora"}, train={"optimizer": "muon"}))
    for command in ("check", "train"):
        assert main([command, path]) == 2
        assert "train.optimizer: muon" in capsys.readouterr().err


def test_a_run_with_every_new_key_is_stopped_and_ends_in_the_same_bytes(recipe: Any, tmp_path: Path) -> None:
    settings = {
        "optimizer": "muon", "schedule": "wsd", "decay_ratio": 0.5, "min_learning_rate": 1e-4, "warmup_steps": None,
        "warmup_ratio": 0.2, "neftune_alpha": 5.0, "label_smoothing": 0.1, "steps": 6,
    }  # fmt: skip
    ends = []
    for name, stops in (("one", set()), ("two", {4})):
        path = recipe(f"{name}.yaml", train=settings, output=str(tmp_path / name))
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, stops)
            if stops:
                with pytest.raises(TemporaryFailure):
                    train(path)
        ends.append(read_patch(train(path)[0]))
    for layer, one in ends[0].layers.items():
        for part, tensor in one.tensors.items():
            assert torch.equal(tensor, ends[1].layers[layer].tensors[part])
