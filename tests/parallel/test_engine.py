"""The engine's law: one step is the same however its rows are cut; and it stops rather than learn nonsense."""

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, BloomConfig, GPT2Config, LlamaConfig

from lorakit.base.layers import checkpoint_layers, num_positions
from lorakit.base.transformers_io import load_base
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler
from lorakit.errors import LorakitError, RunError
from lorakit.lora import adapter_tensors, inject
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.objectives.objective import SFT, Objective
from lorakit.parallel import Engine, Group, NonFiniteStep, StepSettings, open_engine
from lorakit.parallel.adapter_state import build_optimizer
from lorakit.parallel.axis import axes_of
from lorakit.parallel.group import Mesh
from lorakit.recipe import ParallelSection, TrainSection
from lorakit.training.model_checks import (
    check_causal,
    check_sequence,
    enable_packing,
    loss_matches_logits,
    probe_rows,
    verify_chunked_loss,
)
from lorakit.training.refusals import check_positions
from tests.helpers.rows import chat, tokenize_rows, write_rows, write_weighted_rows

CPU = torch.device("cpu")


def trained(
    base: Path, batches: BatchSampler, steps: int = 4, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Adapter and losses after some steps."""
    model = inject(load_base(base, torch.float32, CPU), rank=3, dropout=settings.pop("dropout", 0.0))
    if settings.pop("checkpointing", False):
        checkpoint_layers(model)
    engine = open_engine(ParallelSection())
    optimizer = partial(build_optimizer, TrainSection(weight_decay=0.01))
    engine.prepare(LossModel(model), optimizer, StepSettings(settings.pop("seed", 0), 1.0, lambda step: 0.01))
    losses = [engine.step(step, batches.step(step)).loss for step in range(steps)]
    assert engine.tensors_without_gradient() == []
    return engine.adapter_state_dict(), losses


def prepared(base: Path) -> tuple[Engine, LossModel]:
    """Return an engine on a fresh adapter, and what it trains."""
    loss_model = LossModel(inject(load_base(base, torch.float32, CPU), rank=3))
    engine = open_engine(ParallelSection())
    optimizer = partial(build_optimizer, TrainSection(weight_decay=0.01))
    engine.prepare(loss_model, optimizer, StepSettings(0, 1.0, lambda step: 0.01))
    return engine, loss_model


def test_a_step_is_accumulate_and_update(base: Path, batches: Any) -> None:
    by_step, _ = prepared(base)
    by_verbs, _ = prepared(base)
    for index in range(3):
        report = by_step.step(index, batches(3).step(index))
        parts = by_verbs.accumulate(batches(3).step(index))
        assert (parts.loss, parts.metrics) == (report.loss, report.metrics)
        assert by_verbs.update(0.01) == report.grad_norm
    for name, tensor in by_step.adapter_state_dict().items():
        assert torch.equal(by_verbs.adapter_state_dict()[name], tensor)


def test_the_metrics_of_a_step_are_over_all_its_label_tokens(base: Path, batches: Any) -> None:
    engine, loss_model = prepared(base)
    sampler = batches(3)
    for index in range(12):  # until it hits something
        engine.step(index, sampler.step(index))
    hits = [token_scores(loss_model, batch.to(CPU)).hits for batch in sampler.step(12)]
    assert len(hits) == 3

    report = engine.step(12, sampler.step(12))

    assert report.metrics == {"accuracy": pytest.approx(float(torch.cat(hits).mean()), rel=1e-6)}
    assert 0 < report.metrics["accuracy"] < 1


def test_an_objective_that_may_not_add_up_over_tokens_is_refused_where_ranks_share_rows(base: Path) -> None:
    largest = Objective(SFT.counts, lambda scores: (scores.losses.max(),), {})
    axes = axes_of(Mesh(data=Group(), replicas=Group(0, 2), sequence=Group(0, 2)), Group(0, 2), CPU)

    with pytest.raises(RunError, match=r'parallel.sequence: .* give lorakit.Objective per="token" if'):
        axes["sequence"].cut(LossModel(load_base(base, torch.float32, CPU), largest), None, 1.0)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.matrix), 0.3])
def test_a_step_is_the_same_however_its_rows_are_cut(base: Path, batches: Any, dropout: float) -> None:
    whole, losses = trained(base, batches(8), dropout=dropout)

    for micro_batch_size, packing in ((1, True), (3, True), (8, False), (3, False)):
        parts, part_losses = trained(base, batches(micro_batch_size, packing), dropout=dropout)
        assert part_losses == pytest.approx(losses, rel=1e-6)
        for name, tensor in whole.items():
            assert (parts[name] - tensor).norm() <= 1e-4 * tensor.norm(), (micro_batch_size, packing, name)


def test_activation_checkpointing_changes_nothing_also_with_dropout(base: Path, batches: Any) -> None:
    plain, losses = trained(base, batches(3), dropout=0.2)

    kept, kept_losses = trained(base, batches(3), dropout=0.2, checkpointing=True)

    assert kept_losses == losses
    assert all(torch.equal(kept[name], plain[name]) for name in plain)


def test_dropout_depends_on_seed_and_step_alone(base: Path, batches: Any) -> None:
    torch.manual_seed(1)
    one, _ = trained(base, batches(3), dropout=0.3)
    torch.manual_seed(2)
    same, _ = trained(base, batches(3), dropout=0.3)
    other, _ = trained(base, batches(3), dropout=0.3, seed=1)
    state = torch.get_rng_state()
    trained(base, batches(3), dropout=0.3, steps=1)

    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state()[-100:], state[-100:])


def test_a_step_with_a_value_that_is_not_finite_updates_nothing(base: Path, batches: Any) -> None:
    model = inject(load_base(base, torch.float32, CPU), rank=3)
    engine = open_engine(ParallelSection())
    optimizer = partial(build_optimizer, TrainSection())
    engine.prepare(LossModel(model), optimizer, StepSettings(0, None, lambda step: 0.01))
    next(iter(adapter_tensors(model).values())).data[0, 0] = math.inf
    before = engine.adapter_state_dict()

    with pytest.raises(NonFiniteStep) as caught:
        engine.step(0, batches(4).step(0))

    assert len(caught.value.rows) == 8
    after = engine.adapter_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_base_that_sees_later_tokens_is_refused(batches: Any, is_decoder: bool) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    bert = LossModel(BertLMHeadModel(BertConfig(vocab_size=4000, is_decoder=is_decoder, **size)))

    if is_decoder:
        check_causal(bert, probe_rows(batches(4), CPU), Path())
        return
    with pytest.raises(LorakitError, match="BertLMHeadModel is no causal language model: a token's logits change by"):
        check_causal(bert, probe_rows(batches(4), CPU), Path())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("weights", "repeated"), [([2, 1, 0], [0, 0, 1]), ([0.5, 0.5, 0.5], [0, 1, 2]), ([0.5, 1, 1.5], [0, 1, 1, 2, 2, 2])]
)
def test_a_rows_weight_says_how_often_it_counts(
    base: Path, tokenizer: Any, tmp_path: Path, weights: list[float], repeated: list[int], packing: bool
) -> None:
    own = [chat(f"say {index}", "yes " * (index + 2)) for index in range(3)]

    def step(name: str, content: list[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        file = write_rows(tmp_path / f"{name}.jsonl", content)
        data = tokenize_rows(str(file), "train", tokenizer, RowSettings(64, "truncate", "stop", "answer"))
        engine, _ = prepared(base)
        report = engine.step(0, BatchSampler(data, 9, 2, packing, 0).step(0))
        return report, engine.adapter_state_dict()

    report, adapter = step("weights", [row | {"weight": weight} for row, weight in zip(own, weights, strict=True)])
    expected, expected_adapter = step("rows", [own[index] for index in repeated])

    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-6)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, tensor in expected_adapter.items():
        assert (adapter[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.parametrize("micro_batch_size", [6, 4, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("packing", [True, False])
def test_weights_of_tokens_are_those_of_a_loss_written_by_hand(
    base: Path, tokenizer: Any, tmp_path: Path, packing: bool, micro_batch_size: int
) -> None:
    rows = write_weighted_rows(tmp_path / "rows.jsonl", 6)
    data = tokenize_rows(str(tmp_path / "rows.jsonl"), "train", tokenizer, RowSettings(64, "stop", "stop", "answer"))
    engine, loss_model = prepared(base)
    batches = BatchSampler(data, 6, micro_batch_size, packing, 0)
    for index in range(12):  # until it hits something
        engine.step(index, batches.step(index))
    tensors = adapter_tensors(loss_model.model)
    losses, hits, weights = [], [], []
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        logits = loss_model.model(input_ids=ids[None]).logits[0, 1:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[2:], reduction="none"))
        hits.append(logits.argmax(-1) == ids[2:])
        weights.append(row.get("weight", 1) * torch.tensor(row.get("weights", [1.0] * len(ids))[2:]))
    counted = torch.cat(weights)
    loss = (torch.cat(losses) * counted).sum() / counted.sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()))

    held_out = engine.evaluate(batches.eval_micro_batches(), lambda: False)
    report = engine.step(12, batches.step(12))

    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert report.grad_norm == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-4)
    assert report.num_label_tokens == len(counted) == sum(sum(row["mask"]) for row in rows)
    accuracy = (torch.cat(hits) * counted).sum() / counted.sum()
    assert report.metrics["accuracy"] == pytest.approx(accuracy.item())
    assert 0 < accuracy < 1
    assert held_out is not None
    assert held_out.loss == pytest.approx(loss.item(), rel=1e-5)


def test_an_objective_of_rows_refuses_weights_of_tokens(base: Path, tokenizer: Any, tmp_path: Path) -> None:
    write_weighted_rows(tmp_path / "rows.jsonl", 6)
    data = tokenize_rows(str(tmp_path / "rows.jsonl"), "train", tokenizer, RowSettings(64, "stop", "stop", "answer"))
    objective = Objective(lambda batch: (len(batch.row_indices),), lambda scores: (scores.losses.sum(),), {}, "row")
    engine = open_engine(ParallelSection())
    loss_model = LossModel(inject(load_base(base, torch.float32, CPU), rank=3), objective)
    optimizer = partial(build_optimizer, TrainSection())
    engine.prepare(loss_model, optimizer, StepSettings(0, None, lambda step: 0.01))

    with pytest.raises(RunError, match=r"reads the sums of rows.*data.ignore_keys: \[weights\]"):
        engine.step(0, BatchSampler(data, 6, 3, True, 0).step(0))


def test_a_model_that_mixes_packed_rows_is_found_out(base: Path, batches: Any) -> None:
    model = load_base(base, torch.float32, CPU)
    forward = model.forward
    model.forward = lambda input_ids, use_cache, position_ids=None, row_lengths=None: forward(
        input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], use_cache=use_cache
    )

    called = LossModel(model)
    problem = enable_packing(called, probe_rows(batches(4), CPU), by_rows=False)
    assert problem is not None
    assert "LlamaForCausalLM lets packed rows see each other (outputs differ by " in problem
    # its attention, row by row, has no other row to see
    assert enable_packing(called, probe_rows(batches(4), CPU)) is None
    assert {type(part).__name__ for part in called.row_by_row} == {"LlamaAttention"}


def test_a_model_that_hands_no_row_lengths_to_its_attention_keeps_rows_apart_by_a_mask(
    base: Path, batches: Any
) -> None:
    called = LossModel(load_base(base, torch.float32, CPU))
    forward = called.model.forward
    called.model.forward = lambda row_lengths=None, **inputs: forward(**inputs)  # type: ignore[method-assign]

    enable_packing(called, probe_rows(batches(4), CPU))

    assert not called.packed_attention
    assert called.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_a_model_that_takes_no_row_lengths_keeps_rows_apart_by_a_mask(base: Path, batches: Any) -> None:
    called = LossModel(load_base(base, torch.float32, CPU))
    forward = called.model.forward
    called.model.forward = lambda input_ids, use_cache, position_ids=None: forward(  # type: ignore[method-assign]
        input_ids=input_ids, position_ids=position_ids, use_cache=use_cache
    )

    enable_packing(called, probe_rows(batches(4), CPU))

    assert not called.packed_attention


def test_a_model_whose_logits_are_not_what_its_config_tells_has_its_loss_from_its_own(base: Path, batches: Any) -> None:
    called = LossModel(load_base(base, torch.float32, CPU).requires_grad_(False))
    assert loss_matches_logits(called, probe_rows(batches(4), CPU))
    called.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.01)  # type: ignore[union-attr]

    assert not loss_matches_logits(called, probe_rows(batches(4), CPU))


def test_the_chunked_loss_is_turned_off_only_where_it_is_not_the_models_own(base: Path, batches: Any) -> None:
    for logits_scaled in (False, True):
        loss_model = LossModel(inject(load_base(base, torch.float32, CPU), rank=2))
        if logits_scaled:
            loss_model.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.01)  # type: ignore[union-attr]

        verify_chunked_loss(loss_model, probe_rows(batches(4), CPU), Group())

        assert loss_model.chunked is not logits_scaled


def test_positions_that_stretch_with_the_longest_row_are_refused(base: Path) -> None:
    model = load_base(base, torch.float32, CPU)
    check_positions(model, 10_000)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

    check_positions(model, 256)
    with pytest.raises(RunError, match="rotary positions of this base change for rows longer than 256"):
        check_positions(model, 257)


def test_the_positions_of_a_base_are_its_configs_stretched_by_its_scaling() -> None:
    def positions(**settings: Any) -> int | None:
        return num_positions(LlamaConfig(max_position_embeddings=1024, **settings))

    def rope(kind: str, **settings: Any) -> dict[str, Any]:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}

    assert positions() == 1024
    assert positions(**rope("linear", factor=4.0)) == 4096
    assert positions(**rope("yarn", factor=4.0, original_max_position_embeddings=1024)) == 4096
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    assert positions(**rope("llama3", factor=8.0, **llama3)) == 1024
    assert num_positions(GPT2Config(n_positions=64)) == 64
    assert num_positions(BloomConfig()) is None  # its attention has no positions that end


def test_a_step_count_is_restored_beside_its_parameter() -> None:
    """AdamW's fused kernel reads it there; on a GPU one on the CPU ends the first step after a resume."""
    from lorakit.parallel.fsdp2 import Fsdp2Engine
    from lorakit.parallel.zero import ZeroEngine

    elsewhere = torch.device("meta")
    sharded = object.__new__(Fsdp2Engine)
    sharded._shard_device = elsewhere
    tensor, state = torch.empty(2, 2), defaultdict(dict)
    sharded.adapter = SimpleNamespace(tensors={"A": tensor}, optimizer=SimpleNamespace(state=state))
    sharded.scatter_optimizer("A", "step", torch.tensor(3.0))
    assert state[tensor]["step"].device == elsewhere

    master = torch.empty(4, device=elsewhere)
    zero = object.__new__(ZeroEngine)
    zero._stage = 3
    inner = SimpleNamespace(state=defaultdict(dict))
    zero._zero = SimpleNamespace(optimizer=inner, fp32_partitioned_groups_flat=[master])
    zero._create_state()
    zero._set_steps(torch.tensor(3.0))
    assert {value.device for value in inner.state[master].values()} == {elsewhere}


def test_only_the_axis_of_rows_is_larger_than_one() -> None:
    world = Group(2, 4, 0)
    mesh = Mesh(data=world, replicas=world)
    assert mesh.sizes == {"data": 4, "pipeline": 1, "sequence": 1, "tensor": 1}
    assert (mesh.data.rank, mesh.data, mesh.tensor.rank) == (2, world, 0)


def test_bases_whose_tokens_meet_elsewhere_are_not_cut(base: Path, batches: Any) -> None:
    model = LossModel(load_base(base, torch.float32, CPU))
    mesh = Mesh(data=Group(), replicas=Group(0, 2), sequence=Group(0, 2))
    with pytest.raises(RunError, match="LlamaForCausalLM has an attention of its own"):
        check_sequence(model, probe_rows(batches(4), CPU), mesh)
