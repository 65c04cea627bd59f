"""Processes along pipeline, sequence and tensor in a plan: what each has and sends, and when `auto` takes an axis."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakit.errors import RunError
from lorakit.planning import Machine, machine_with_gpu, make_plan, resolve_auto
from lorakit.planning.activations import ActivationTracer, LiveBytes, MicroBatch, activations_of_part
from lorakit.planning.axes import tokens_of_equal_traffic
from lorakit.planning.estimate import Candidate
from lorakit.planning.gpus import GB
from lorakit.planning.layouts import layouts
from lorakit.planning.memory import MARGIN
from lorakit.planning.model_shapes import read_shapes
from lorakit.planning.plan import Plan
from lorakit.recipe import AdapterSection, BaseSection, Recipe, load_recipe
from tests.helpers.bases import make_base
from tests.helpers.models import build
from tests.helpers.rows import write_rows

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama as its config describes it: 8 layers of 12 H^2 weights, and no weights at all."""
    folder = tmp_path_factory.mktemp("deep")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def of_deep(deep: Path) -> Callable[..., Recipe]:
    """A recipe for the deep base: steps of 8 rows of 1,024 tokens, one in a micro-batch, in four processes."""

    def load(*overrides: str) -> Recipe:
        content = {
            "base": {"model": str(deep), "dtype": "bfloat16"}, "parallel": {"backend": "ddp", "processes": 4},
            "data": {"train": "/elsewhere/rows.jsonl", "max_tokens": 1024}, "output": str(deep / "out"),
            "train": {"steps": 10, "batch_size": 8, "micro_batch_size": 1, "warmup_steps": 2},
        }  # fmt: skip
        (deep / "recipe.yaml").write_text(json.dumps(content))
        return load_recipe(deep / "recipe.yaml", overrides)

    return load


@pytest.fixture(scope="module")
def roomy(of_deep: Callable[..., Recipe]) -> Plan:
    """The plan of the deep base with backend `auto`, where everything fits."""
    return make_plan(of_deep("parallel.backend=auto"), h200())


def h200(gigabytes: float = 141.0) -> Machine:
    """Four GPUs of so much memory."""
    machine = machine_with_gpu("H200", 4, 1, None)
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, memory_bytes=round(gigabytes * GB)))


def layout(plan: Plan, backend: str, **axes: int) -> Candidate:
    return next(one for one in plan.advice.layouts if (one.backend, one.axes) == (backend, axes))


def written(plan: Plan, backend: str) -> Candidate:
    return next(row.candidate for row in plan.advice.backends if row.candidate.backend == backend)


# --- what a process has and sends -----------------------------------------------------------------------------------


def test_a_process_has_its_part_of_weights_and_activations(roomy: Plan) -> None:
    plan, alone = roomy, written(roomy, "ddp")

    tensor, stages = layout(plan, "ddp", tensor=4), layout(plan, "ddp", pipeline=4)
    assert tensor.memory.base == pytest.approx(alone.memory.base / 4, rel=0.01)  # norms are in each process
    assert stages.memory.base == pytest.approx(alone.memory.base / 4, rel=0.25)  # embedding and head are in one each
    assert layout(plan, "fsdp2", sequence=4).memory.base == written(plan, "fsdp2").memory.base

    lines = layout(plan, "ddp", sequence=4)
    assert lines.memory.activations == pytest.approx(alone.memory.activations / 4, rel=0.02)
    in_use = tensor.memory.activations + tensor.memory.logits  # at the loss, where a part has the most
    assert alone.memory.activations / 4 < in_use < 0.3 * alone.memory.activations
    # the first of four stages has a quarter of the layers, and four micro-batches under way
    assert stages.memory.activations == pytest.approx(alone.memory.activations, rel=0.05)
    assert stages.idle == 3 / (8 + 3)
    assert (lines.idle, tensor.idle) == (0, 0)


def test_layers_wait_for_the_messages_of_their_axis(roomy: Plan) -> None:
    plan = roomy
    steps, tokens, width, value = 8, 8 * 1024, 768, 2  # micro-batches, tokens, values of a token, bytes of a value

    sent = layout(plan, "ddp", pipeline=4).traffic
    assert sent.keys() == {"pipeline"}
    assert sent["pipeline"].num_messages == 2 * steps  # of a stage in the middle
    assert sent["pipeline"].num_bytes == 2 * tokens * width * value

    sent = layout(plan, "ddp", sequence=4).traffic
    assert sent["sequence"].num_messages == 4 * 8 * steps
    assert sent["sequence"].num_bytes == 2 * 8 * 4 * (tokens / 4) * width * value * 3 / 4
    assert sent["data"].num_messages == written(plan, "ddp").traffic["data"].num_messages

    sent = layout(plan, "ddp", tensor=2).traffic
    gathers, scatters = (
        4 * 8 + 1,
        1 + (4 * 8 - 1) + 1,
    )  # of a step with nothing recomputed; two numbers of labels in full
    assert sent["tensor"].num_messages == (steps / 2) * (gathers + scatters + 2) + 1
    along = 8 * (5 * 8 - 3) * 2  # x A^T of q, k, v, gate and up, but of the first block
    uncut = 4 * 8 * (8 * (5 * 768) + 8 * (2 * 768))  # A of those five, B of o and down: once in a step, twice in a ring
    of_tokens = (tokens / 2) * ((gathers + scatters) * width * value + along)
    assert sent["tensor"].num_bytes == 1 / 2 * (of_tokens + 2 * uncut)
    assert layout(plan, "ddp", tensor=2).step.waiting > written(plan, "ddp").step.waiting


def test_weights_or_tokens_cut_every_byte_but_those_of_the_head(deep: Path) -> None:
    form = MicroBatch(1, 256, 256, packed=True, masked=False, row_lengths=(256,))
    full, part = (
        ActivationTracer(
            deep, BaseSection(model=str(deep)), AdapterSection(), torch.bfloat16, checkpointing=False, tensor=tensor
        ).training(form)
        for tensor in (1, 4)
    )
    assert full.saved / 4 < part.saved < full.saved / 2
    assert activations_of_part(full, part, 4) == LiveBytes(full.saved / 4, part.head, full.layer / 4)
    assert full.head / 4 < part.head < full.head


def test_tensor_sends_less_than_gathering_for_few_tokens(deep: Path) -> None:
    section = BaseSection(model=str(deep))
    shapes = read_shapes(deep, section, AdapterSection(), torch.bfloat16)
    assert tokens_of_equal_traffic(shapes, "bfloat16", 8) == pytest.approx(3 * 768 / 8, rel=1e-3)
    quantized = read_shapes(deep, BaseSection(model=str(deep), quantize="nf4"), AdapterSection(), torch.bfloat16)
    assert 0.7 < tokens_of_equal_traffic(quantized, "bfloat16", 8) / (768 / 8) < 0.9


def test_layouts_divide_processes_machines_and_heads() -> None:
    sizes = {"pipeline": (2, 4, 8), "sequence": (2, 4), "tensor": (2, 4)}
    single = list(layouts(sizes, 1, 8, 4, 4))
    assert single == [{axis: size} for axis, allowed in sizes.items() for size in allowed]
    for found in (*layouts(sizes, 2, 8, 4, 4), *layouts(sizes, 3, 8, 4, 4)):
        assert found.get("sequence", 1) * found.get("tensor", 1) <= 4
        assert found.get("pipeline", 1) * found.get("sequence", 1) * found.get("tensor", 1) <= 8
    assert list(layouts(sizes, 3, 8, 4, 4)) == [{"pipeline": 2, "sequence": 2, "tensor": 2}]


# --- the plan's text ------------------------------------------------------------------------------------------------


def test_the_plan_shows_each_axis_and_when_tensor_sends_less(roomy: Plan, of_deep: Callable[..., Recipe]) -> None:
    plan = roomy
    assert "tensor: 4 sends less than gathering the base where a process has fewer than 57" in plan.text
    assert "here it has 1,024" in plan.text
    for axis in ("pipeline", "sequence", "tensor"):
        assert f"x 4, {axis}" in plan.text
    assert {tuple(facts["axes"]) for facts in plan.facts()["layouts"]} == {("pipeline",), ("sequence",), ("tensor",)}
    named = make_plan(of_deep("parallel.tensor=2"), h200())  # a recipe that names its axes
    assert named.advice.layouts == ()
    assert "ddp x 4, tensor 2" in named.text
    assert f"tensor {layout(plan, 'ddp', tensor=2).traffic['tensor'].num_messages} x " in named.text
    assert "a process's part of the base of 0.12 GB fits each process, so a step sends what its axes need" in named.text
    assert "so nothing of the base is gathered" in make_plan(of_deep("parallel.tensor=4"), h200()).text
    assert make_plan(of_deep("parallel.processes=1"), machine_with_gpu("H200", 1, 1, None)).advice.layouts == ()


def test_the_plan_says_why_an_axis_is_missing(recipe: Write, tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    data = {"train": "/elsewhere/rows.jsonl", "eval": None, "packing": False}
    path = recipe(base={"model": str(tmp_path / "gpt2")}, data=data, parallel={"backend": "ddp", "processes": 2})
    text = make_plan(load_recipe(path), machine_with_gpu("H200", 2, 1, None)).text
    assert "no sequence the recipe does not pack rows (data.packing)" in text
    assert "no tensor   transformers has no plan (tp_plan) how to cut GPT2LMHeadModel" in text
    assert "x 2, pipeline 2" in text


# --- auto -----------------------------------------------------------------------------------------------------------


def least(candidates: list[Candidate]) -> float:
    """Gigabytes that the smallest of several needs on a GPU."""
    return min(one.memory.peak for one in candidates) * (1 + MARGIN) / GB


def test_auto_takes_an_axis_only_where_no_backend_alone_fits(roomy: Plan, of_deep: Callable[..., Recipe]) -> None:
    left_open, advice = of_deep("parallel.backend=auto"), roomy.advice
    several = [row.candidate for row in advice.backends if row.candidate.num_processes == 4]
    alone, along = least(several), least(list(advice.layouts))
    assert along < alone

    assert resolve_auto(left_open, h200(1.001 * alone), fresh=True).values in (
        {"parallel.backend": "fsdp2"},
        {"parallel.backend": "zero3"},
    )
    choice = resolve_auto(left_open, h200((alone + along) / 2), fresh=True)

    chosen = {key: size for key, size in choice.values.items() if key != "parallel.backend"}
    assert chosen
    assert choice.values["parallel.backend"] in ("ddp", "fsdp2")
    assert "no backend alone fits 4 processes (" in choice.why
    assert f"GB with 25% to spare, one H200 has {(alone + along) / 2:.1f} GB" in choice.why
    for key, size in chosen.items():
        assert f"{key.removeprefix('parallel.')}: {size}" in choice.why
    Recipe.model_validate(choice.apply(left_open).model_dump())  # a recipe that can be run


def test_auto_refuses_with_the_numbers_where_no_layout_fits(of_deep: Callable[..., Recipe]) -> None:
    with pytest.raises(
        RunError,
        match=r"nothing fits .* the smallest with nothing recomputed, .* x 4, .*, needs .* GB with 25% to spare",
    ) as e:
        resolve_auto(of_deep("parallel.backend=auto"), h200(0.5), fresh=True)
    assert "one H200 has 0.5 GB" in str(e.value)


def test_a_run_that_goes_on_has_the_axes_it_began_with(of_deep: Callable[..., Recipe], deep: Path) -> None:
    left_open = of_deep("parallel.backend=auto")
    section = left_open.model_dump(mode="json")
    section["parallel"] |= {"backend": "fsdp2", "tensor": 2}
    (deep / "out").mkdir()
    (deep / "out/run.json").write_text(json.dumps({"recipe": section}))
    choice = resolve_auto(left_open, fresh=False)
    assert choice.values == {"parallel.backend": "fsdp2", "parallel.tensor": 2}
    assert choice.why == "fsdp2, tensor: 2, as this run was begun"


@pytest.mark.parametrize("axis", ["sequence", "tensor"])
def test_an_axis_that_the_heads_do_not_divide_by_is_refused(of_deep: Callable[..., Recipe], axis: str) -> None:
    with pytest.raises(RunError, match=f"parallel.{axis}: 3 processes cannot share the 8 heads"):
        make_plan(of_deep("parallel.processes=3", f"parallel.{axis}=3"))


# --- beside reality -------------------------------------------------------------------------------------------------


@pytest.mark.spread
@pytest.mark.slow
def test_a_run_with_an_axis_that_auto_took_is_what_the_plan_says(recipe: Write, tmp_path: Path, tokenizer: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
    folder = make_base(tmp_path / "base", tokenizer, **sizes)
    rows = write_rows(tmp_path / "long.jsonl", [{"text": "so many green birds " * 100}] * 4)
    path = recipe(
        base={"model": str(folder)}, parallel={"backend": "auto", "processes": 2},
        data={"train": str(rows), "eval": None, "max_tokens": 256, "on_long_rows": "truncate", "loss_on": "all"},
        train={"steps": 2, "batch_size": 2, "micro_batch_size": 1, "warmup_steps": 1},
    )  # fmt: skip
    roomy = make_plan(load_recipe(path))
    alone = [row.candidate for row in roomy.advice.backends if row.candidate.num_processes == 2]
    needs = sum(2 * least(candidates) * GB for candidates in (alone, list(roomy.advice.layouts))) / 2
    machine = replace(roomy.machine, host_memory_bytes=round(needs))

    choice = resolve_auto(load_recipe(path), machine, fresh=True)
    overrides = [f"{key}={value}" for key, value in choice.values.items()]
    # processes whose memory is all their own
    command = [sys.executable, "-m", "lorakit.cli", "train", str(path), *overrides, "--why", choice.why]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stderr
    assert "auto       ddp: no backend alone fits 2 processes (" in done.stdout
    record, planned = json.loads((tmp_path / "out/run.json").read_text()), layout(roomy, "ddp", tensor=2)
    assert choice.values == {"parallel.backend": "ddp", "parallel.tensor": 2}
    ranks = [record["engine"], *record["ranks"]]
    assert planned.memory.base == max(rank["base_bytes"] for rank in ranks)
    assert planned.memory.adapter == max(rank["adapter_bytes"] for rank in ranks)
    for rank in ranks:
        assert rank["mesh"]["tensor"] == 2
        sent = rank["collectives_by_axis"]["tensor"].values()
        assert sum(kind["calls"] for kind in sent) == planned.traffic["tensor"].num_messages
    taken = max(rank["peak_memory_bytes"] for rank in ranks)
    assert taken == pytest.approx(planned.memory.peak, rel=MARGIN)
    assert 2 * taken <= machine.host_memory_bytes
