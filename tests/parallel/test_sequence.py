"""Ranks that share the tokens of a line take the steps of one process, with every backend."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tests.helpers.bases import make_base
from tests.helpers.messages import assert_planned
from tests.helpers.ranks import Case, run_cases
from tests.helpers.rows import write_judged_rows, write_text_rows, write_uneven_rows, write_weighted_rows
from tests.parallel.test_backends import EMBED, KTO, assert_same

pytestmark = [pytest.mark.matrix, pytest.mark.spread, pytest.mark.slow]

PLAIN: Case = {"name": "plain", "steps": 3}
CUT: Case = {"name": "cut", "steps": 3, "micro_batch_size": 2, "rank": 1, "checkpointing": True, "dropout": 0.2}
ONE_ROW: Case = {"name": "one-row", "steps": 2, "micro_batch_size": 1, "batch_size": 3, "objective": "two terms"}
WINDOW: Case = {"name": "window", "steps": 2, "base": "window"}
NF4: Case = {"name": "nf4", "steps": 2, "micro_batch_size": 3, "quantize": "nf4"}
INT8: Case = CUT | {"name": "int8", "steps": 2, "quantize": "int8"}
WEIGHTED: Case = {"name": "weighted", "steps": 2, "micro_batch_size": 2, "rows": "weighted.jsonl"}
PAIRS: Case = {"name": "pairs", "steps": 3, "batch_size": 6, "micro_batch_size": 2, "objective": "pairs"}
ALONE = [PLAIN, CUT, ONE_ROW, WINDOW, NF4, INT8, PAIRS, WEIGHTED, KTO, EMBED]
SHARED: dict[tuple[str, int, int], list[Case]] = {
    ("ddp", 2, 2): [PLAIN, CUT, ONE_ROW, WINDOW, NF4, PAIRS, WEIGHTED, KTO, EMBED],
    ("ddp", 4, 4): [PLAIN, WINDOW],  # two heads of keys and values, each repeated for two ranks
    ("ddp", 4, 2): [
        CUT,
        ONE_ROW,
        PAIRS,
        KTO,
        EMBED,
    ],  # of three pairs, a rank with other rows has none in its second micro-batch
    ("zero2", 2, 2): [CUT, NF4],
    ("zero3", 2, 2): [CUT, NF4],
    ("fsdp2", 2, 2): [PLAIN, CUT, NF4, PAIRS],
    ("fsdp2", 4, 2): [CUT, INT8],
}
"""(backend, processes, those that share a line) -> cases"""
Results = Callable[[str, int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("sequence")
    make_base(folder / "base", tokenizer, num_hidden_layers=2)
    torch.manual_seed(0)
    window = MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.1, sliding_window=5,
    )  # fmt: skip
    MistralForCausalLM(window).save_pretrained(folder / "window")
    tokenizer.save_pretrained(folder / "window")
    write_uneven_rows(folder / "rows.jsonl", 20)
    write_weighted_rows(folder / "weighted.jsonl", 20)
    write_judged_rows(folder / "judged.jsonl", 20)
    write_text_rows(folder / "texts.jsonl", 20)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    @functools.cache
    def results(backend: str, processes: int, sequence: int) -> dict[str, Any]:
        parallel = {"backend": backend, "sequence": sequence}
        cases = ALONE if backend == "single" else SHARED[backend, processes, sequence]
        return run_cases(folder, processes, [case | {"parallel": parallel} for case in cases])

    return results


@pytest.mark.xdist_group("sequence")
@pytest.mark.parametrize(("backend", "processes", "sequence"), SHARED)
def test_ranks_that_share_lines_take_the_steps_of_one_process(
    results: Results, backend: str, processes: int, sequence: int
) -> None:
    alone, shared = results("single", 1, 1), results(backend, processes, sequence)

    for case in SHARED[backend, processes, sequence]:
        assert_same(shared[case["name"]], alone[case["name"]])


@pytest.mark.xdist_group("sequence")
@pytest.mark.parametrize(("backend", "processes", "sequence"), SHARED)
def test_tokens_meet_in_attention_alone_as_planned(
    results: Results, folder: Path, backend: str, processes: int, sequence: int
) -> None:
    """Two messages for each layer and direction, one of heads and one of outputs; nothing else goes along the axis."""
    for case in SHARED[backend, processes, sequence]:
        if case in (KTO, EMBED):  # whose first pass sends more
            continue
        for rank in results(backend, processes, sequence)[case["name"]]["ranks"]:
            assert rank["mesh"] == {"data": processes // sequence, "pipeline": 1, "sequence": sequence, "tensor": 1}
            assert rank["groups_of_no_axis"] == []
            if "quantize" not in case:
                assert_planned(folder / case.get("base", "base"), case, rank)
    if (backend, processes) == ("ddp", 4) and sequence == 2:  # one-row: micro-batches, layers, directions, messages
        assert rank["collectives_by_axis"]["sequence"]["all_to_all"]["calls"] == 2 * 2 * 2 * 2
