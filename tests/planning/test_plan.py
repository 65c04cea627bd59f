"""The plan: memory of a process by backend, the simplest layout that fits, what to change where none fits, and `auto`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorakit.backends import BACKENDS
from lorakit.cli import main
from lorakit.errors import LorakitError, RunError
from lorakit.planning import Machine, Plan, machine_with_gpu, make_plan, resolve_auto
from lorakit.planning.machine import GB, GPUS, OTHER_NAMES, cgroup_rooms, named_gpu
from lorakit.planning.memory import CPU_PROCESS, MARGIN, PACKAGE_BYTES, Memory
from lorakit.recipe import Recipe, load_recipe
from tests.helpers.fork_server import run_python

H200 = machine_with_gpu("H200", 2, 1, None)
Write = Callable[..., Path]
Load = Callable[..., Recipe]


def with_memory(machine: Machine, gigabytes: float) -> Machine:
    """The same machine with GPUs of another memory."""
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, memory_bytes=round(gigabytes * GB)))


def config_of(folder: Path, **changes: Any) -> Path:
    """The config of a Llama, and nothing else."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8 billion parameters."""
    return config_of(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of 8 equal layers."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 1024}
    return config_of(tmp_path_factory.mktemp("deep"), **sizes, num_hidden_layers=8)


def recipe_of(base: Path, *overrides: str, tokens: int = 2048, rows: int = 1, processes: int = 2) -> Recipe:
    """A recipe for a base without rows: in each process ``rows`` rows of ``tokens`` tokens in a micro-batch."""
    content = {
        "base": {"model": str(base), "dtype": "bfloat16"}, "output": str(base / "out"),
        "data": {"train": "/elsewhere/rows.jsonl", "eval": None, "max_tokens": tokens},
        "train": {"steps": 10, "batch_size": processes * rows, "micro_batch_size": rows, "warmup_steps": 2},
        "parallel": {"backend": "ddp", "processes": processes},
    }  # fmt: skip
    (base / "recipe.yaml").write_text(json.dumps(content))
    return load_recipe(base / "recipe.yaml", overrides)


def memory(plan: Plan, backend: str) -> Memory:
    return next(candidate.memory for candidate in plan.backends if candidate.backend == backend)


def least(plan: Plan, num_processes: int) -> float:
    """Gigabytes of a GPU with which the smallest backend of so many processes fits."""
    candidates = [one for one in plan.backends if one.num_processes == num_processes]
    return min(one.memory.peak for one in candidates) * (1 + MARGIN) / GB


# --- memory by category ---------------------------------------------------------------------------------------------


def test_each_backend_has_the_bytes_of_its_formula(large: Path) -> None:
    plan = make_plan(recipe_of(large), H200)
    full = memory(plan, "ddp")
    assert full.base == 2 * 8_030_261_248  # the parameters of Llama-3-8B
    for backend in BACKENDS:
        one = memory(plan, backend)
        splits_base, splits_moments = backend in ("zero3", "fsdp2"), backend not in ("single", "ddp")
        splits_gradients = backend in ("zero2", "zero3", "fsdp2")
        assert one.base == pytest.approx(full.base / (2 if splits_base else 1), rel=1e-6)
        assert one.optimizer == pytest.approx(2 * full.adapter / (2 if splits_moments else 1), rel=1e-3)
        assert one.gradients == pytest.approx(full.adapter / (2 if splits_gradients else 1), rel=1e-6)
        assert one.peak >= one.training >= one.base + one.adapter
        assert one.saving < one.training


def test_offloading_moves_bytes_to_the_host(large: Path) -> None:
    offloads = ((), ("parallel.offload=cpu",))
    resident, on_host = (
        memory(make_plan(recipe_of(large, "parallel.backend=zero3", *offload), H200), "zero3") for offload in offloads
    )
    assert on_host.base == on_host.optimizer == 0 < resident.base
    assert on_host.host > resident.host


def test_a_quantised_process_has_a_quarter_of_the_base(large: Path) -> None:
    plans = [make_plan(recipe_of(large, *more), H200) for more in ((), ("base.quantize=nf4",))]
    for backend in ("single", "ddp", "zero3", "fsdp2"):
        full, quantised = (memory(plan, backend) for plan in plans)
        in_floats = 2 * 2 * 128256 * 4096 // (1 if backend in ("single", "ddp") else 2)  # embedding and head
        assert quantised.base - in_floats == pytest.approx((full.base - in_floats) * (4.127 / 16), rel=0.01)
        assert quantised.loading < quantised.training < full.training
        assert quantised.activations - full.activations == pytest.approx(2 * 14336 * 4096, rel=1.0)


@pytest.mark.matrix
def test_moments_in_8_bits_take_less_and_paged_ones_are_on_the_host(large: Path) -> None:
    def planned(name: str, rank: int) -> Memory:
        return memory(make_plan(recipe_of(large, f"train.optimizer={name}", f"adapter.rank={rank}"), H200), "ddp")

    plain, eight, paged = (planned(name, 512) for name in ("adamw", "adamw8bit", "paged_adamw"))
    assert eight.optimizer == pytest.approx(plain.optimizer * (2 + 8 / 256) / 8, rel=0.01)
    assert paged.optimizer == 0
    assert paged.host - plain.host == pytest.approx(plain.optimizer, rel=1e-3)
    assert eight.disk < plain.disk
    assert 0 < planned("paged_adamw", 8).optimizer < planned("adamw", 8).optimizer  # small tensors are not paged


@pytest.mark.matrix
def test_fixed_tensors_of_an_adapter_are_in_checkpoints(large: Path) -> None:
    inits = ("gaussian", "pissa")
    plain, twice = (memory(make_plan(recipe_of(large, f"adapter.init={init}"), H200), "ddp") for init in inits)
    assert twice.adapter == plain.adapter
    assert twice.base == plain.base + plain.adapter  # A0 and B0
    assert twice.disk == plain.disk + 5 * plain.adapter  # two checkpoints, two being written, the patch


@pytest.mark.matrix
def test_the_libraries_of_a_process_are_constants_of_its_dtype_backend_and_quantisation(recipe: Write) -> None:
    machine = replace(H200, gpu=None)
    plain = make_plan(load_recipe(recipe()), machine)
    quantised = make_plan(load_recipe(recipe(base={"quantize": "nf4"})), machine)
    assert memory(plain, "ddp").process == CPU_PROCESS["float32"]
    assert memory(plain, "zero2").process == CPU_PROCESS["float32"] + PACKAGE_BYTES["deepspeed"]
    assert memory(quantised, "ddp").process == CPU_PROCESS["float32"] + PACKAGE_BYTES["bitsandbytes"]


def test_no_weight_is_read(tmp_path: Path, base: Path, recipe: Write) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in base.iterdir():
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        (folder / file.name).write_bytes(content[:header] if file.suffix == ".safetensors" else content)
    full = make_plan(load_recipe(recipe()), H200)
    cut = make_plan(load_recipe(recipe(base={"model": str(folder)})), H200)
    assert memory(cut, "single") == memory(full, "single")


def test_a_plan_starts_no_process(
    recipe: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a process is started, which reads the current folder's Python files")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    assert main(["plan", str(recipe())]) == 0
    assert "advice" in capsys.readouterr().out


# --- advice ---------------------------------------------------------------------------------------------------------


def test_the_simplest_backend_that_fits_is_advised(large: Path) -> None:
    roomy = make_plan(recipe_of(large), H200)
    tight = make_plan(recipe_of(large, "train.activation_checkpointing=layers"), with_memory(H200, 19))
    for plan, backend, limit in ((roomy, "ddp", 141), (tight, "fsdp2", 19)):
        assert plan.best is not None
        assert plan.best.backend == backend
        for candidate in plan.backends:
            assert candidate.fits == (candidate.memory.peak * (1 + MARGIN) <= limit * GB)
    assert roomy.why.startswith("the simplest that fits, ")
    assert "needs" not in roomy.why
    assert "; zero2 x 2 needs 23.3 GB with 25% to spare, one H200 has 19.0 GB" in tight.why
    assert "the recipe  requests ddp, which cannot run here, for the reason above" in tight.text


def test_one_process_is_not_advised_where_several_are_requested(recipe: Write) -> None:
    plan = make_plan(load_recipe(recipe(parallel={"backend": "ddp", "processes": 2})), H200)
    assert plan.best is not None
    assert (plan.best.backend, plan.best.num_processes) == ("ddp", 2)


@pytest.mark.matrix
def test_the_named_change_makes_it_fit(large: Path) -> None:
    plan = make_plan(recipe_of(large, tokens=4096, rows=2), with_memory(H200, 19))
    change = plan.change
    assert plan.best is None
    assert change is not None
    assert change.fits
    overrides = (f"{key}={json.dumps(value)}" for key, value in change.changes.items())
    changed = make_plan(recipe_of(large, *overrides, tokens=4096, rows=2), with_memory(H200, 19))
    assert memory(changed, change.backend) == change.memory
    assert next(one for one in changed.backends if one.backend == change.backend).fits
    assert f"; it would with parallel.backend={change.backend}, train.activation_checkpointing=layers" in str(
        plan.refusal
    )


@pytest.mark.matrix
def test_more_processes_are_named_where_nothing_else_helps(large: Path) -> None:
    little = with_memory(
        machine_with_gpu("H200", 2, 1, 12 * GB), 12
    )  # a machine's two processes share 12 GB on the host
    plan = make_plan(recipe_of(large, "parallel.offload=cpu", "parallel.backend=fsdp2", tokens=1024), little)
    assert plan.change is not None
    assert plan.change.changes["parallel.processes"] == 8


@pytest.mark.matrix
def test_nothing_helps_a_machine_that_is_far_too_small(large: Path) -> None:
    plan = make_plan(recipe_of(large), with_memory(H200, 1))
    assert plan.best is plan.change is None
    assert "and no change known here helps: take a smaller base" in str(plan.refusal)


@pytest.mark.matrix
def test_a_backend_whose_package_is_missing_is_not_called_too_large(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(H200, described=False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # an import fails, as without the package

    plan = make_plan(recipe_of(large, "parallel.backend=zero3"), here)
    tight = make_plan(recipe_of(large, "parallel.backend=zero2"), with_memory(here, 15))

    rows = {line.split()[0]: line for line in plan.text.splitlines() if " x 2 " in line}
    assert all(rows[name].endswith("  not installed") for name in ("zero1", "zero2", "zero3"))
    assert rows["fsdp2"].endswith("fits")
    assert (
        "zero3       needs the package deepspeed, which is not installed: pip install 'lorakit[deepspeed]'" in plan.text
    )
    assert "requests zero3, which cannot run here, for the reason above" in plan.text
    zero3 = next(candidate for candidate in plan.backends if candidate.backend == "zero3")
    assert (zero3.fits, zero3.can_run) == (True, False)
    assert "too large, not installed" in tight.text


@pytest.mark.matrix
def test_checkpointing_left_open_is_taken_only_where_memory_needs_it(large: Path) -> None:
    recipe = recipe_of(large, "train.activation_checkpointing=auto", rows=2)
    for machine, checkpointing in ((H200, False), (with_memory(H200, 30), True)):
        ddp = next(one for one in make_plan(recipe, machine).backends if one.backend == "ddp")
        assert (ddp.checkpointing, ddp.fits) == (checkpointing, True)


def test_backends_that_other_keys_refuse_are_left_out_with_the_reason(large: Path) -> None:
    plan = make_plan(recipe_of(large, "train.optimizer=adamw8bit"), with_memory(H200, 12))
    assert [candidate.backend for candidate in plan.backends] == ["single", "ddp"]
    assert (
        "zero1, zero2, fsdp2, zero3: train.optimizer: adamw8bit goes with backend single or ddp\n" in f"{plan.text}\n"
    )
    # no number of processes helps tensors that are in each
    assert plan.change is None or "parallel.processes" not in plan.change.changes


@pytest.mark.matrix
def test_paged_moments_need_a_gpu(recipe: Write) -> None:
    plan = make_plan(load_recipe(recipe(), ("train.optimizer=paged_adamw8bit",)))
    assert all("pages" in candidate.shortfall for candidate in plan.backends)
    assert plan.change is None


# --- axes -----------------------------------------------------------------------------------------------------------


def test_a_process_has_its_part_along_each_axis(deep: Path) -> None:
    plans = {}
    for axis in ("sequence", "pipeline", "tensor"):
        recipe = recipe_of(deep, f"parallel.{axis}=4", "train.batch_size=8", tokens=1024, processes=4)
        plans[axis] = make_plan(recipe, machine_with_gpu("H200", 4, 1, None))
        assert f"ddp x 4, {axis} 4 " in plans[axis].text
    alone_plan = make_plan(recipe_of(deep, "train.batch_size=8", tokens=1024, processes=4), H200)
    alone = memory(alone_plan, "ddp")
    parts = {axis: memory(plan, "ddp") for axis, plan in plans.items()}

    assert parts["sequence"].base == alone.base
    assert parts["pipeline"].base == pytest.approx(alone.base / 4, rel=0.25)  # embedding and head are in one each
    assert parts["tensor"].base == pytest.approx(alone.base / 4, rel=0.01)  # norms are in each process
    assert parts["sequence"].activations == pytest.approx(alone.activations / 4, rel=0.02)
    # the first of four stages has a quarter of the layers, and the activations of four micro-batches
    assert parts["pipeline"].activations == pytest.approx(alone.activations, rel=0.05)
    # inputs of norms and residual sums are of all tokens in each process
    assert alone.activations / 4 < parts["tensor"].activations < 0.5 * alone.activations


@pytest.mark.parametrize("axis", ["sequence", "tensor"])
def test_an_axis_that_the_heads_do_not_divide_by_is_refused(deep: Path, axis: str) -> None:
    with pytest.raises(RunError, match=f"parallel.{axis}: 3 processes cannot share the 8 heads"):
        make_plan(recipe_of(deep, f"parallel.{axis}=3", processes=3))


def test_axes_that_do_not_divide_the_planned_machine_are_refused(deep: Path) -> None:
    with pytest.raises(RunError, match="tensor: 2 does not divide 1 planned processes; give --gpus"):
        make_plan(recipe_of(deep, "parallel.tensor=2"), machine_with_gpu("H200", 1, 1, None))


# --- auto -----------------------------------------------------------------------------------------------------------


def test_a_recipe_that_leaves_nothing_open_is_not_planned(recipe: Write) -> None:
    assert load_recipe(recipe(base={"model": "/nowhere"})).auto_keys == ()  # so `run_or_launch` plans nothing


def test_a_resumed_run_has_the_backend_it_began_with(deep: Path) -> None:
    left_open = recipe_of(deep, "parallel.backend=auto")
    section = left_open.model_dump(mode="json")
    section["parallel"] |= {"backend": "fsdp2"}
    (deep / "out").mkdir()
    (deep / "out/run.json").write_text(json.dumps({"recipe": section}))
    assert resolve_auto(left_open, fresh=False) == ({"parallel.backend": "fsdp2"}, "fsdp2, as this run was begun")


def test_auto_refuses_with_the_numbers_where_nothing_fits(deep: Path) -> None:
    left_open = recipe_of(deep, "parallel.backend=auto", tokens=1024, processes=4)
    with pytest.raises(RunError, match=r"nothing fits .* the smallest with nothing recomputed, .* x 4, needs ") as e:
        resolve_auto(left_open, with_memory(machine_with_gpu("H200", 4, 1, None), 0.5), fresh=True)
    assert "one H200 has 500 MB" in str(e.value)


def test_auto_is_refused_with_what_only_a_named_backend_can_do(recipe: Write) -> None:
    for words, overrides in (
        ("offload: goes with a backend that is named", ("parallel.offload=cpu",)),
        ("looks at this machine alone", ("parallel.processes=4", "parallel.nodes=2", "parallel.rendezvous=a:1")),
    ):
        with pytest.raises(LorakitError, match=words):
            load_recipe(recipe(), ("parallel.backend=auto", *overrides))


@pytest.mark.matrix
def test_auto_ends_where_nothing_fits(recipe: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorakit.planning.machine.free_host_memory", lambda: 100_000_000)
    with pytest.raises(RunError, match=r"parallel.backend: auto: nothing fits as the recipe stands"):
        resolve_auto(load_recipe(recipe(), ("parallel.backend=auto",)), fresh=False)


@pytest.mark.spread
def test_a_launcher_of_others_chooses_nothing(recipe: Write) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = run_python("-m", "lorakit.cli", "train", recipe(), "parallel.backend=auto", env=os.environ | variables)
    assert done.returncode == 2
    assert "parallel.backend: `auto` is chosen by the `lorakit train` that starts the processes" in done.stderr


@pytest.mark.spread
def test_auto_is_chosen_and_recorded_by_a_run(recipe: Write, tmp_path: Path) -> None:
    path = recipe(parallel={"backend": "auto", "processes": 2}, train={"activation_checkpointing": "auto", "steps": 4})
    done = run_python("-m", "lorakit.cli", "train", path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["engine"]["backend"] == record["recipe"]["parallel"]["backend"] == "ddp"
    assert record["recipe"]["train"]["activation_checkpointing"] == "none"
    assert record["auto"].startswith("ddp x 2: the simplest that fits, ")
    assert "memory suffices without recomputation" in record["auto"]
    assert f"auto       {record['auto']}" in done.stdout


# --- machines -------------------------------------------------------------------------------------------------------


def test_a_gpu_is_known_under_the_names_that_people_and_drivers_give_it() -> None:
    for given, name in (
        ("h200", "H200"), ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("a100-80gb", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("L40S", "L40S"), ("L4", "L4"),
        ("NVIDIA A100 80GB PCIe", "A100-80"), ("NVIDIA A100-PCIE-40GB", "A100-40"), ("NVIDIA H100 PCIe", "H100"),
        ("Tesla V100-SXM2-32GB", "V100-32"), ("Tesla V100-PCIE-16GB", "V100-16"), ("L4 24GB", "L4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
    ):  # fmt: skip
        assert named_gpu(given) is GPUS[name], given
    for name, gpu in GPUS.items():
        for spelled in (name, name.lower().replace(" ", ""), f"NVIDIA {name.upper()}"):
            assert named_gpu(spelled) is gpu, spelled
    for other, name in OTHER_NAMES.items():
        assert named_gpu(other) is GPUS[name], other


def test_a_gpu_of_a_similar_name_is_not_taken_for_another() -> None:
    unknown = ("RTX 4090 Laptop GPU", "RTX A1000", "RTX A4000", "T400", "RTX 3060 8GB", "A100-SXM4-80GB MIG 1g.10gb")
    for name in (*unknown, "", "abacus"):
        assert named_gpu(name) is None, name
    assert named_gpu("Tesla V100-SXM2-32GB") is not named_gpu("Tesla V100-SXM2-16GB")


@pytest.mark.matrix
def test_a_gpu_can_be_given_by_its_memory(recipe: Write) -> None:
    of_base = load_recipe(recipe())
    known = make_plan(of_base, machine_with_gpu("RTX 4090", 2, 1, None))
    other = make_plan(of_base, machine_with_gpu(None, 2, 1, None, 24 * GB))
    mixed = make_plan(of_base, machine_with_gpu("RTX 4090", 2, 1, None, 12 * GB))

    assert "2 x GPU of 24 GB" in other.text
    assert memory(other, "fsdp2") == memory(known, "fsdp2")
    assert "2 x RTX 4090 of 12 GB" in mixed.text


@pytest.mark.matrix
def test_a_dtype_left_open_is_float32_on_a_gpu_without_bfloat16(recipe: Write) -> None:
    left_open = load_recipe(recipe(), ("base.dtype=auto",))
    dtypes = {name: make_plan(left_open, machine_with_gpu(name, 2, 1, None)).estimator.dtype for name in ("T4", "L4")}
    assert dtypes == {"T4": "float32", "L4": "bfloat16"}


def test_the_memory_of_a_control_group_counts(tmp_path: Path) -> None:
    group = tmp_path / "jobs" / "mine"
    group.mkdir(parents=True)
    (tmp_path / "jobs/memory.max").write_text("1000\n")
    (tmp_path / "jobs/memory.current").write_text("700\n")
    (tmp_path / "jobs/memory.stat").write_text("anon 100\ninactive_file 200\n")
    (group / "memory.max").write_text("max\n")
    assert cgroup_rooms(tmp_path, {"": "/jobs/mine"}) == [500]
    assert cgroup_rooms(tmp_path, {}) == []


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_describes_a_machine_and_writes_every_figure(
    recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpu", "H200", "--gpus", "8", "--nodes", "2", "--json", str(tmp_path / "p.json")]
    assert main(["plan", str(recipe()), *arguments]) == 0
    text = capsys.readouterr().out
    assert "2 x 8 x H200 of 141 GB" in text
    assert "fits, advised" in text
    facts = json.loads((tmp_path / "p.json").read_text())
    assert [row["backend"] for row in facts["backends"]] == list(BACKENDS)
    assert facts["backends"][1]["processes"] == 16
    assert facts["advice"] == facts["advised"]["backend"] == "ddp"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H2000000"], "'H2000000' is not known. Nearest: 'H200'"),
        (["--gpu", "rtx 4075"], "--gpu-memory-gb N"),
        (["--gpu", "abacus"], "'abacus' is not known."),
        (["--gpus", "8"], "--gpus: describes a machine; name its GPU with --gpu"),
    ],
)
def test_an_unknown_machine_is_refused(
    recipe: Write, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe()), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_recipe_that_does_not_fit_ends_with_2_and_a_change(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_of(large, tokens=4096, rows=2, processes=1)
    assert main(["plan", str(large / "recipe.yaml"), "--gpu", "RTX 4090"]) == 2
    assert "nothing fits as the recipe stands; it would with parallel.backend=" in capsys.readouterr().err
