"""Ranks that share every weight take the steps of one process, and send what the base's own cut sends."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorakit.base.lazy import LazyTensors
from lorakit.base.meta import load_on_meta
from lorakit.base.quantized import load_quantized, quant_config
from lorakit.errors import RunError
from lorakit.lora import inject
from lorakit.objectives.cross_entropy import LossModel
from lorakit.parallel import Group
from lorakit.parallel.tensor.plan import checked_plan
from lorakit.parallel.tensor.probe import Probe
from tests.helpers.bases import make_base
from tests.helpers.messages import assert_planned, shapes_of_case
from tests.helpers.models import scrambled
from tests.helpers.ranks import Case, run_cases
from tests.helpers.rows import write_text_rows, write_uneven_rows
from tests.parallel.test_backends import EMBED, after_half, assert_same

PLAIN: Case = {"name": "plain", "steps": 2}
CUT: Case = {"name": "cut", "steps": 2, "micro_batch_size": 2, "rank": 1, "checkpointing": True, "dropout": 0.2}
NORMS: Case = {  # norms inside a cut block, and outside of any, are trained too; embedding and head are one weight
    "name": "norms", "steps": 2, "base": "qwen3", "micro_batch_size": 3,
    "adapter": {"modules_to_save": ["q_norm", "input_layernorm"]},
}  # fmt: skip
BIASED: Case = {"name": "biased", "steps": 2, "base": "gpt_neox", "objective": "two terms", "packing": False}
# sgd, because biases of keys have no gradient but rounding, and AdamW and Lion make it large
BIASES: Case = BIASED | {"name": "biases", "optimizer": "sgd", "adapter": {"bias": "all"}}
HEAD: Case = {"name": "head", "steps": 2, "adapter": {"modules_to_save": ["lm_head"], "init": "pissa"}}
EMBEDDED: Case = {
    "name": "embedded",
    "steps": 2,
    "micro_batch_size": 3,
    "adapter": {"targets": ["embed_tokens", "up_proj"]},
}
FULL: Case = {  # trained in full, a layer of either cut
    "name": "full", "steps": 2, "optimizer": "sgd", "max_grad_norm": 100.0,
    "adapter": {"targets": ["q_proj", "o_proj"], "modules_to_save": ["down_proj", "up_proj"]},
}  # fmt: skip
GEMMA: Case = {
    "name": "gemma",
    "steps": 2,
    "base": "gemma3_text",
    "micro_batch_size": 3,
    "smoothing": 0.1,
    "neftune": 5.0,
}
LION: Case = {"name": "lion", "steps": 2, "optimizer": "lion"}
DORA: Case = GEMMA | {"name": "dora", "dropout": 0.1, "adapter": {"method": "rsdora"}}
# one head of keys and values on both ranks, with DoRA and biases of its own there
SHARED_HEADS: Case = {
    "name": "shared-heads", "steps": 2, "base": "llama", "dropout": 0.1, "optimizer": "sgd", "max_grad_norm": 0.5,
    "adapter": {"targets": "all-linear", "method": "dora", "bias": "all"},
}  # fmt: skip
# two heads of keys and values, each on two of four ranks
TWO_SHARED: Case = PLAIN | {"name": "two-shared-heads", "base": "qwen3", "micro_batch_size": 3}
HALF: Case = BIASED | {"name": "half", "dtype": "bfloat16"}
FIRST: Case = {"name": "first-half", "steps": 1}
RESUMED: Case = PLAIN | {"name": "resumed", "resume": "first-half"}
EXPERTS: Case = {  # adapters on experts, and the router in full
    "name": "experts", "steps": 2, "base": "mixtral",
    "adapter": {"targets": ["q_proj", "o_proj"], "target_parameters": "all-experts", "modules_to_save": ["gate"]},
}  # fmt: skip
FIRST_EXPERTS: Case = EXPERTS | {"name": "first-experts", "steps": 1}
RESUMED_EXPERTS: Case = EXPERTS | {"name": "resumed-experts", "resume": "first-experts"}
# layers with experts and without
SPARSE: Case = EXPERTS | {"name": "sparse", "base": "qwen3_moe", "micro_batch_size": 3, "checkpointing": True}
# shared experts: on each rank, because transformers' plan does not cut them; and cut, where attention is not
SHARED: Case = {
    "name": "shared", "steps": 2, "base": "qwen2_moe", "micro_batch_size": 3,
    "adapter": {"target_parameters": ["experts.down_proj"], "modules_to_save": ["gate"]},
}  # fmt: skip
LATENT: Case = {
    "name": "latent", "steps": 2, "base": "deepseek_v3", "dropout": 0.0,
    "adapter": {"targets": ["down_proj", "gate_proj"], "modules_to_save": ["experts"]},
}  # fmt: skip
# pairs of experts that are equally good but for rounding, of which one is chosen
TIES: Case = EXPERTS | {"name": "ties", "steps": 1, "base": "ties", "evaluate": False}
ALONE = [
    PLAIN, CUT, NORMS, BIASED, BIASES, SHARED_HEADS, TWO_SHARED, HEAD, EMBEDDED, FULL, GEMMA, LION, DORA, HALF, FIRST,
    EXPERTS, SPARSE, SHARED, LATENT, FIRST_EXPERTS, EMBED,
]  # fmt: skip
DDP, FSDP2 = {"backend": "ddp", "tensor": 2}, {"backend": "fsdp2", "tensor": 2}
PARTS: dict[int, list[Case]] = {
    2: [
        *(
            case | {"parallel": DDP}
            for case in (PLAIN, BIASED, SHARED_HEADS, HEAD, EMBEDDED, FULL, GEMMA, LION, DORA, HALF, EMBED)
        ),
        *(case | {"parallel": FSDP2} for case in (CUT, RESUMED, BIASES)),
        *(case | {"parallel": DDP} for case in (EXPERTS, SHARED, TIES)),
        *(case | {"parallel": FSDP2} for case in (RESUMED_EXPERTS, LATENT)),
    ],
    4: [
        CUT | {"parallel": DDP | {"sequence": 2}},
        NORMS | {"parallel": FSDP2},
        SHARED_HEADS | {"parallel": FSDP2},
        TWO_SHARED | {"parallel": {"backend": "ddp", "tensor": 4}},
        PLAIN | {"parallel": FSDP2},
        SPARSE | {"parallel": FSDP2},
        PLAIN | {"name": "staged", "micro_batch_size": 2, "parallel": DDP | {"pipeline": 2}},
    ],
    8: [CUT | {"parallel": FSDP2 | {"pipeline": 2}}],
}
"""processes -> cases"""
OTHER_BASES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 1, "attention_bias": True},
    "gpt_neox": {},
    "gemma3_text": {},
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 2},
    "qwen2_moe": {},
    "deepseek_v3": {"num_key_value_heads": 4},
}
Results = Callable[[int], dict[str, Any]]
spread = [pytest.mark.xdist_group("tensor"), pytest.mark.matrix, pytest.mark.spread, pytest.mark.slow]
EACH = [pytest.param(number, marks=spread) for number in PARTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    # parts of different sizes: of the vocabulary, and of the MLP
    make_base(folder / "base", tokenizer, num_hidden_layers=2, intermediate_size=49, vocab_size=len(tokenizer) + 1)
    for name, settings in OTHER_BASES.items():
        model = scrambled(name, **settings, vocab_size=len(tokenizer), max_position_embeddings=256)
        for parameter in model.parameters():
            parameter.data = 0.3 * parameter.data + float(parameter.dim() == 1)  # norms near 1, as a base's are
        model.save_pretrained(folder / name)
    settings = {"num_local_experts": 8, "num_experts_per_tok": 1, "max_position_embeddings": 256}
    ties, generator = scrambled("mixtral", vocab_size=len(tokenizer), **settings), torch.Generator().manual_seed(1)
    for name, parameter in ties.named_parameters():
        parameter.data = 0.3 * parameter.data + float(parameter.dim() == 1)
        if name.endswith("gate.weight"):
            parameter.data[4:] = parameter.data[:4] * (1 + 1e-7 * torch.randn(4, 32, generator=generator).sign())
    ties.save_pretrained(folder / "ties")
    write_uneven_rows(folder / "rows.jsonl", 20)
    write_text_rows(folder / "texts.jsonl", 20)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    @functools.cache
    def results(processes: int) -> dict[str, Any]:
        cases = [case | {"parallel": {"backend": "single"}} for case in ALONE]
        if processes > 1:
            for half in ("first-half", "first-experts"):
                torch.save(results(1)[half], folder / half)
            cases = [
                case | ({"resume": str(folder / case["resume"])} if "resume" in case else {})
                for case in PARTS[processes]
            ]
        return run_cases(folder, processes, cases)

    return results


@pytest.mark.parametrize("processes", EACH)
def test_ranks_that_share_weights_take_the_steps_of_one_process(results: Results, processes: int) -> None:
    alone, shared = results(1), results(processes)

    for case in PARTS[processes]:
        name, result = case["name"], shared[case["name"]]
        if name == "ties":  # rounding chooses among them, so one process takes other steps; the start is not refused
            assert result["ranks"][0]["mesh"]["tensor"] == 2
        elif name == "half":  # as far from float32 as one process is
            exact, own, other = (each["adapter"] for each in (alone["biased"], alone["half"], result))
            assert 0 < distance(other, exact) <= 1.5 * distance(own, exact)
        elif "resume" in case:
            uninterrupted = "experts" if case["resume"] == "first-experts" else "plain"
            assert_same(after_half(alone, result, case["resume"]), alone[uninterrupted])
        else:
            assert_same(result, alone["plain" if name == "staged" else name])


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return sum(float((some[name] - others[name]).square().sum()) for name in others) ** 0.5


@pytest.mark.parametrize("processes", EACH[:2])
def test_a_rank_has_its_part_of_the_base(results: Results, folder: Path, processes: int) -> None:
    alone, ranks = results(1)["plain"]["ranks"][0], results(processes)["plain"]["ranks"]  # with ddp, then with fsdp2
    if processes == 2:
        for shapes, parts in (
            (shapes_of_case(folder / "base", {"name": "plain"}, 2), ranks),
            (shapes_of_case(folder / EXPERTS["base"], EXPERTS, 2), results(2)["experts"]["ranks"]),
        ):
            assert max(rank["base_bytes"] for rank in parts) == shapes.base_bytes
            assert max(rank["adapter_bytes"] for rank in parts) == shapes.adapter_bytes
    for rank in ranks:
        assert rank["base_bytes"] <= 1.05 * alone["base_bytes"] / processes
        assert rank["mesh"] == {"data": processes // 2, "pipeline": 1, "sequence": 1, "tensor": 2}
        assert rank["groups_of_no_axis"] == []


@pytest.mark.parametrize("processes", [pytest.param(2, marks=spread)])
def test_an_adapter_sends_one_message_more_than_the_base_does(results: Results, processes: int) -> None:
    layers = 2
    forward = 1 + 2 * layers + 2  # the embedding's output, two of each layer, two numbers of each label
    backward = 2 * layers - 1 + 1  # two inputs of each layer but the first one, without a gradient, and the loss's
    for facts in results(processes)["plain"]["ranks"]:
        sent = facts["collectives_by_axis"]["tensor"]
        # and once in a step the gradients of the adapter
        assert {kind: count["calls"] for kind, count in sent.items()} == {"all_reduce": forward + backward + 1}


@pytest.mark.parametrize("processes", EACH)
def test_a_plan_counts_the_messages_of_a_step(results: Results, folder: Path, processes: int) -> None:
    planned = [case for case in PARTS[processes] if case["name"] in ("plain", "cut", "staged", "experts", "embedded")]
    for case in planned:
        for rank in results(processes)[case["name"]]["ranks"]:
            assert_planned(folder / case.get("base", "base"), case, rank)
    assert planned


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, "cannot share the 3 heads of"),
        ("llama", {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}, "cannot share the 3 heads of"),
        ("gpt2", {}, r"transformers has no plan \(tp_plan\) to cut GPT2LMHeadModel"),
        ("mixtral", {"intermediate_size": 44}, "cannot share the 44 columns of each expert of .* needs a multiple of 4"),
        ("inkling2_text", {}, r"experts has down_proj \(rowwise\), gate_up_proj \(colwise\)"),
        ("gpt_oss", {}, "transformers has no plan"),
        ("phi3", {}, "is 'colwise_gather_output'"),
    ],
)  # fmt: skip
def test_a_base_that_cannot_be_cut_is_refused_by_name(architecture: str, settings: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        checked_plan(scrambled(architecture, **settings), 2)


def test_a_quantised_base_is_refused_with_the_backends_that_shard_it(folder: Path) -> None:
    model, _ = load_quantized(folder / "base", torch.float32, quant_config("nf4"), torch.device("cpu"))
    with pytest.raises(RunError, match="q_proj is quantised, and only weights in floats are cut; .* fsdp2 and zero3"):
        checked_plan(model, 2)


def test_an_adapter_that_cannot_be_cut_is_refused_by_name() -> None:
    model = inject(scrambled("llama", mlp_bias=True), modules_to_save=["down_proj"], targets=["q_proj"])
    with pytest.raises(RunError, match="down_proj is trained in full, and has a bias"):
        checked_plan(model, 2)
    assert checked_plan(model, 1) == {}


def test_layers_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    scrambled("llama").save_pretrained(tmp_path)
    model = load_on_meta(tmp_path, torch.float32)
    weights = LazyTensors(tmp_path, model)
    probe = Probe(model, weights, torch.device("cpu"))
    assert list(probe.layers) == ["model.layers.0"]  # the second one is of its kind
    other = LossModel(scrambled("llama"))
    probe.check(other, Group())

    mlp = other.model.get_submodule("model.layers.0.mlp")
    right_but_its_gradient = mlp.register_forward_hook(lambda module, args, y: y + (y - y).sqrt())
    with pytest.raises(RunError, match="gives other outputs where ranks share its weights, off by inf"):
        probe.check(other, Group())
    right_but_its_gradient.remove()
    with torch.no_grad():
        other.model.get_parameter("model.layers.0.mlp.down_proj.weight")[0, 0] += 1
    with pytest.raises(RunError, match="LlamaForCausalLM gives other outputs where ranks share its weights"):
        probe.check(other, Group())
    other.model.get_submodule("model.layers.0.self_attn").head_dim = 5  # type: ignore[assignment]
    with pytest.raises(RunError, match="LlamaForCausalLM does not run on parts"):
        probe.check(other, Group())
