"""The programs that measure: they run where they should, count only equal work, and say what they cannot measure."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import gpu, gpu_sides, page, sequence, stream
from benchmarks.__main__ import PROGRAMS, TARGETS, earlier
from benchmarks.machine import CPU, hardware
from benchmarks.models import SHAPES, make_model
from benchmarks.targets import measured
from lorakit.quant.linear import QuantLinear
from lorakit.quant.published import quant_scheme

ROOT = Path(__file__).parent.parent
BARE = """
import sys
ABSENT = {"pydantic", "deepspeed", "bitsandbytes", "datasets", "pyarrow", "xxhash", "rich", "matplotlib"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, *rest)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from benchmarks.gpu import main
main(["--tiny", "--rounds", "1", "--rows", "G2", "G7", "G8"])
assert "lorakit.recipe" not in sys.modules  # the only reader of yaml, which transformers needs by itself
"""


@pytest.mark.spread
@pytest.mark.matrix
def test_gpu_rows_need_torch_transformers_and_peft_and_no_more() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("G2  tokens per second ") for line in lines), done.stdout
    assert any(line.startswith("G7 not measured: ") and "bitsandbytes" in line for line in lines)
    assert any(line.startswith("G8 not measured: ") for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([])

    assert capsys.readouterr().out == "G1, G2, G3, G4, G5, G6, G7, G8, G9 not measured: there is no CUDA device here\n"


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_made_on_a_device_computes_as_transformers_own(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "tie_word_embeddings": tied})
    made = make_model("tiny", torch.float32, CPU)
    expected = LlamaForCausalLM(made.config)
    expected.load_state_dict(made.state_dict())
    ids = torch.arange(5, 25)[None]

    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied
    torch.testing.assert_close(made.eval()(ids).logits, expected.eval()(ids).logits)


def test_a_packed_base_is_never_whole_in_floats() -> None:
    pytest.importorskip("bitsandbytes")
    made = make_model("tiny", torch.bfloat16, CPU, quant_scheme("nf4"))

    linear = {name for name, module in made.named_modules() if type(module) is torch.nn.Linear}
    assert linear == {"lm_head"}
    assert sum(isinstance(module, QuantLinear) for module in made.modules()) == 7 * SHAPES["tiny"]["num_hidden_layers"]
    assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


def one_run(side: str, *, loss: float = 8.0, norm: float = 1.0, rows: int = 8, peak: int = 10) -> dict[str, Any]:
    rounds = [{"seconds": 2.0, "loss": loss, "grad_norm": norm}]
    return {"side": side, "rows_at_a_time": rows, "peak_bytes": peak, "rounds": rounds}


def result_of(*runs: dict[str, Any]) -> dict[str, Any]:
    found = {"runs": list(runs), "rows": 8, "tokens": 100, "flops_of_a_token": 1.0, "matmul_flops": 1.0}
    return {**found, "differs": gpu_sides.differences(runs)}


@pytest.mark.parametrize("other", [{"loss": 8.1}, {"norm": 1.2}, {"loss": float("nan")}])
def test_a_row_whose_sides_did_other_work_has_no_figure(other: dict[str, float]) -> None:
    result = result_of(one_run("lorakit"), one_run("peft", **other))

    assert gpu_sides.rates(result) == {}
    assert "peft did other work" in gpu_sides.fails(result)
    assert gpu_sides.rates(result_of(one_run("lorakit"), one_run("peft")))["tokens per second"] == 50


@pytest.mark.matrix
def test_an_adapter_that_is_left_out_is_noticed() -> None:
    work = gpu_sides.Work("tiny", 4, 32, ())
    ours = gpu_sides.fitting("lorakit", work, CPU, 1)

    assert not gpu_sides.differences([ours, gpu_sides.fitting("peft", work, CPU, 1, 2)])
    assert gpu_sides.differences([ours, gpu_sides.fitting("peft", replace(work, size=0.0), CPU, 1)])


def test_memory_is_compared_at_as_many_rows_at_a_time() -> None:
    equal = one_run(gpu_sides.AS_PEFT, rows=4, peak=6)
    result = result_of(one_run("lorakit", peak=10), one_run("peft", rows=4, peak=12), equal)

    assert gpu_sides.rates(result)["peak memory / peft"] == 0.5
    assert gpu_sides.rates(result)["peak memory, GB"] == 10 / 1e9


def test_memory_of_a_part_of_the_rows_does_not_stand_for_all() -> None:
    result = result_of(one_run("lorakit", rows=4))

    assert "peak memory, GB" not in gpu_sides.rates(result)
    assert gpu_sides.fails(result) == "lorakit: only 4 of 8 rows fit at a time"


@pytest.mark.matrix
def test_a_side_that_runs_out_of_memory_takes_half_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(side: str, work: gpu_sides.Work, device: torch.device) -> gpu_sides.Step:
        def step(micro_batches: Any) -> tuple[float, float]:
            if max(map(len, micro_batches)) > limit:
                raise torch.OutOfMemoryError("no CPU runs out of memory so")
            return float(sum(map(len, micro_batches))), 1.0

        return step

    monkeypatch.setattr(gpu_sides, "build", build)
    work = gpu_sides.Work("tiny", 8, 4, ("lorakit",))
    limit = 2
    found = gpu_sides.fitting("lorakit", work, CPU, 1)
    limit = 0
    nothing = gpu_sides.fitting("lorakit", work, CPU, 1)

    assert found["rows_at_a_time"] == 2
    assert found["rounds"][0]["loss"] == 8
    assert nothing["failed"].startswith("out of memory")


def test_every_gpu_row_is_measured_or_has_a_reason() -> None:
    assert [f"G{number}" for number in range(1, 10)] == gpu.ROWS
    assert {target.program for target in gpu.TARGETS} == set(gpu.WORKS)


def test_every_target_is_measured_by_a_program() -> None:
    assert {target.program for target in TARGETS} <= set(PROGRAMS)


def test_results_of_one_machine_share_a_column_and_rows_without_a_figure_are_named() -> None:
    first, second = (target for target in TARGETS if target.row in ("P1", "P4") and "fsdp2" not in target.figure)
    results = [
        {"hardware": "a", "rates": {first.program: {first.figure: 0.5}}},
        {"hardware": "b", "rates": {first.program: {first.figure: 0.6}}},
        {"hardware": "a", "rates": {first.program: {first.figure: 0.7}, second.program: {second.figure: 0.9}}},
    ]
    heading, _, *lines, _, missing = page.targets(results)

    assert heading == "| row | figure | target | a | b |"
    assert [line.split(" | ")[3:] for line in lines] == [["0.500", "**0.600** |"], ["0.900", " |"]]
    assert missing.startswith("Not in these results: C1, ")
    assert "P1" not in missing


def test_activations_count_where_the_loss_is_that_of_one_process() -> None:
    sent = {"all_to_all": {"calls": 16}}
    alone, shared = sequence.LAYOUTS
    result = {
        alone: {"losses": [8.0, 8.0], "saved_bytes": 100, "sent": {}},
        shared: {"losses": [8.0, 8.0], "saved_bytes": 54, "sent": sent},
    }

    assert sequence.rates(result)[f"{shared}: activations / one process"] == 0.54
    result[shared]["losses"] = [8.0, 8.001]
    assert sequence.rates(result) == {}


def test_what_clients_that_left_still_hold_is_counted() -> None:
    held = {"rss": 10, "kv_bytes": 0, "Row": 1}

    assert stream.stayed({"held": [held, {**held, "rss": 99}]}) == {}
    assert stream.stayed({"held": [held, {"rss": 10, "kv_bytes": 64, "Task": 2}]}) == {
        "kv_bytes": 64, "Row": -1, "Task": 2
    }  # fmt: skip


def test_only_a_result_of_all_programs_on_this_hardware_is_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    rates = {TARGETS[-1].program: {TARGETS[-1].figure: 1.0}}
    for written, said in (
        ({"hardware": "another machine", "rates": rates}, "was measured on another machine, and this is"),
        ({"hardware": hardware()}, "is of one program"),
    ):
        path.write_text(json.dumps(written))
        with pytest.raises(SystemExit, match=said):
            earlier(path)
    with pytest.raises(SystemExit, match="cannot be read"):
        earlier(tmp_path / "absent.json")
    path.write_text(json.dumps({"hardware": hardware(), "rates": rates}))

    assert list(measured(TARGETS, earlier(path))) == [(TARGETS[-1], 1.0)]
