"""All rows in one kernel call give the results of rows one by one; a kernel that cannot do that is not used.

Without a GPU the kernel is a function written here after the documentation of torch's; with one it is torch's own.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit.base.transformers_io import load_base
from lorakit.data.row_settings import RowSettings
from lorakit.data.sampler import BatchSampler, collate
from lorakit.objectives.cross_entropy import LossModel, token_scores
from lorakit.ops.packed_attention import (
    CAUSAL,
    Masks,
    RowLengths,
    VarlenKernel,
    enable_packed_attention,
    row_bounds,
    varlen_kernel,
)
from lorakit.training import model_checks
from lorakit.training.model_checks import enable_packing, probe_rows
from lorakit.training.summary import _fallbacks
from tests.helpers.models import SMALL
from tests.helpers.packed_rows import LENGTHS, model_of, packed_line
from tests.helpers.rows import tokenize_rows

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Queries (tokens, heads, size), keys and values (tokens, key heads, size) -> (tokens, heads, size)."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    left, right = (10**6 if side < 0 else side for side in window_size)
    outputs = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end])
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        q, k = torch.arange(end - start)[:, None], torch.arange(end - start)
        mask = (k >= q - left) & (k <= q + right)
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), value[start:end])
        )
    return torch.cat(outputs)


def varlen_attn_without_gqa(
    query: Any, key: Any, value: Any, a: Any, b: Any, c: int, d: int, *, scale: Any, window_size: Any
) -> Any:
    """The same without grouped queries, as in older versions of torch."""
    return varlen_attn(query, key, value, a, b, c, d, scale=scale, window_size=window_size)


class Calls:
    """A kernel's function that records the windows and bounds of its calls."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []
        self.bounds: list[torch.Tensor] = []

    def __call__(self, query: Any, key: Any, value: Any, cu: Any, *rest: Any, window_size: Any, enable_gqa: bool = False, **more: Any) -> Any:  # fmt: skip
        self.windows.append(window_size)
        self.bounds.append(cu)
        return varlen_attn(query, key, value, cu, *rest, window_size=window_size, enable_gqa=enable_gqa, **more)

    def kernel(self) -> VarlenKernel:
        return VarlenKernel(self, (torch.float32,))


def qwen2() -> Any:
    """Build a model of one layer with a window of 4, and one without."""
    torch.manual_seed(0)
    layers = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SMALL, **layers)).eval()


def a_kernel(function: Any = varlen_attn) -> VarlenKernel:
    return VarlenKernel(function, (torch.float32,))


def heads(query: int = 4, key: int = 2, size: int = 8, **more: Any) -> list[torch.Tensor]:
    generator = torch.Generator(more.get("device", "cpu")).manual_seed(0)
    return [torch.randn(1, n, sum(LENGTHS), size, generator=generator, **more) for n in (query, key, key)]


def with_gradients(model: Any, rows: RowLengths) -> list[torch.Tensor]:
    logits = model(**packed_line(), use_cache=False, row_lengths=rows).logits
    assert rows.was_used
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [logits.detach(), *torch.autograd.grad(logits.square().sum(), parameters)]


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("llama", [(-1, 0), (-1, 0)]), ("qwen3", [(-1, 0), (-1, 0)]), ("phi3", [(-1, 0), (-1, 0)]),
        ("mistral", [(3, 0), (3, 0)]), ("gemma3_text", [(3, 0), (3, 0)]), ("qwen2", [(-1, 0), (3, 0)]),
        ("gpt_neox", [(-1, 0), (-1, 0)]), ("opt", [(-1, 0), (-1, 0)]),
    ],
)  # fmt: skip
def test_one_call_gives_the_outputs_and_gradients_of_rows_one_by_one(architecture: str, windows: Any) -> None:
    model = qwen2() if architecture == "qwen2" else model_of(architecture)
    assert enable_packed_attention(model)
    calls = Calls()

    one_by_one = with_gradients(model, RowLengths(LENGTHS))
    at_once = with_gradients(model, RowLengths(LENGTHS, calls.kernel()))

    assert calls.windows == windows
    assert len({id(bounds) for bounds in calls.bounds}) == 1
    for one, other in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_within_a_window_are_plainly_causal() -> None:
    model = model_of("mistral")
    enable_packed_attention(model)
    calls = Calls()
    ids = torch.randint(3, 64, (1, 8))

    model(input_ids=ids, position_ids=torch.arange(4).repeat(2)[None], use_cache=False, row_lengths=RowLengths((4, 4), calls.kernel()))  # fmt: skip

    assert calls.windows == [CAUSAL, CAUSAL]


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "llama4_text"])
def test_caps_sinks_and_chunks_are_left_to_rows_one_by_one(architecture: str) -> None:
    model = model_of(architecture)
    enable_packed_attention(model)
    calls = Calls()
    expected = model(**packed_line(), use_cache=False, row_lengths=RowLengths(LENGTHS)).logits

    logits = model(**packed_line(), use_cache=False, row_lengths=RowLengths(LENGTHS, calls.kernel())).logits

    chunked = [CAUSAL] if architecture == "llama4_text" else []  # its layers without chunks
    assert set(calls.windows) <= set(chunked)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dropout": 0.1}, {"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"position_bias": torch.zeros(1)},
        {"is_causal": False}, {"cache": object()},
    ],
)  # fmt: skip
def test_arguments_that_the_kernel_cannot_handle_are_not_supported(arguments: dict[str, Any]) -> None:
    module, kernel = SimpleNamespace(), a_kernel()

    assert kernel.supports(module, *heads(), {"dropout": 0.0, "scaling": 0.3, "softcap": None, "sliding_window": 9})  # type: ignore[arg-type]
    assert not kernel.supports(module, *heads(), arguments)  # type: ignore[arg-type]
    assert not kernel.supports(SimpleNamespace(is_causal=False), *heads(), {})  # type: ignore[arg-type]


def test_heads_of_other_sizes_or_dtypes_are_not_supported() -> None:
    module: Any = torch.nn.Linear(1, 1)
    query, key, value = heads()

    assert not a_kernel().supports(module, *heads(size=12), {})
    assert not a_kernel().supports(module, *heads(size=264), {})
    assert a_kernel().supports(module, *heads(size=256), {})
    assert not a_kernel().supports(module, query, key, heads(size=16)[2], {})
    assert not VarlenKernel(varlen_attn).supports(module, query, key, value, {})
    assert VarlenKernel(varlen_attn).supports(module, query.bfloat16(), key.bfloat16(), value.bfloat16(), {})
    assert not VarlenKernel(varlen_attn).supports(module, query.bfloat16(), key.bfloat16(), value, {})


@pytest.mark.parametrize("window", [CAUSAL, (2, 0)])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("function", [varlen_attn, varlen_attn_without_gqa])
def test_heads_share_keys_in_either_form_of_the_kernel(function: Any, scale: float | None, window: Any) -> None:
    query, key, value = heads()
    alone = []
    for q, k, v in zip(*(part.split(LENGTHS, 2) for part in (query, key, value)), strict=True):
        positions = torch.arange(q.shape[2])
        mask = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
        if window != CAUSAL:
            mask &= positions > positions[:, None] - 3
        alone.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True))

    logits = a_kernel(function)(query, key, value, row_bounds(LENGTHS, CPU), max(LENGTHS), window, scale)

    torch.testing.assert_close(logits, torch.cat(alone, 2).transpose(1, 2))


def test_torchs_own_function_takes_the_arguments_and_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert varlen_kernel(CUDA) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    kernel = varlen_kernel(CUDA)
    assert kernel is not None
    query, key, value = (part.to(META, torch.bfloat16).requires_grad_() for part in heads())

    outputs = kernel(query, key, value, row_bounds(LENGTHS, META), max(LENGTHS), (3, 0), 0.5)
    outputs.sum().backward()

    assert outputs.shape == (1, sum(LENGTHS), 4, 8)
    assert key.grad is not None
    assert key.grad.shape == key.shape
    assert varlen_kernel(CPU) is None


class Reads(TorchFunctionMode):
    """Counts the times that Python reads a tensor's values, and waits for a device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)
        return func(*args, **(kwargs or {}))


def test_a_device_is_read_once_for_a_rule_and_pass() -> None:
    rule = {"mask_function": lambda b, h, q, k: (k <= q) & (k > q - 700), "device": CPU, "local_size": 700}
    masks = Masks(lambda: None, rule, skip_causal=True)
    with Reads() as reads:
        windows = {masks.window((900, 1500, 3)) for _ in range(4)}

    assert windows == {(699, 0)}
    assert reads.count == 1


@pytest.mark.parametrize(
    ("rule", "local_size"),
    [
        (lambda b, h, q, k: k <= q + 1, None), (lambda b, h, q, k: (k <= q) & (k > q - 5), None),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), 4), (lambda b, h, q, k: (k <= q) & (k // 4 == q // 4), 4),
        (lambda b, h, q, k: (k <= q) & ((k < 600) | (k != q)), None),
    ],
)  # fmt: skip
def test_a_rule_that_is_not_causal_in_its_window_has_none(rule: Any, local_size: int | None) -> None:
    arguments = {"mask_function": rule, "device": CPU, "local_size": local_size}

    assert Masks(lambda: None, arguments, skip_causal=True).window((5, 620, 1)) is None


def test_a_rule_that_cannot_be_evaluated_in_blocks_has_no_window() -> None:
    arguments = {"mask_function": lambda b, h, q, k: k <= q, "device": CPU}

    assert Masks(lambda: None, arguments, skip_causal=True).window((5, 6)) == CAUSAL
    assert Masks(lambda: None, arguments | {"use_vmap": True}, skip_causal=True).window((5, 6)) is None


def test_a_model_with_eager_attention_has_no_kernel() -> None:
    model = model_of("llama")
    model.set_attn_implementation("eager")
    enable_packed_attention(model)
    calls = Calls()

    model(**packed_line(), use_cache=False, row_lengths=RowLengths(LENGTHS, calls.kernel()))

    assert calls.windows == []


# --- a run compares its logits with the kernel before it relies on it --------------------------------------------------------------------


@pytest.fixture
def batches(rows: Path, tokenizer: Any) -> BatchSampler:
    return BatchSampler(
        tokenize_rows(str(rows), "train", tokenizer, RowSettings(64, "truncate", "stop", "answer")), 8, 4, True, 0
    )


def with_packing(
    base: Path, batches: BatchSampler, monkeypatch: pytest.MonkeyPatch, kernel: VarlenKernel | None
) -> LossModel:
    """Return the loss model after a run has enabled packing on a machine with this kernel."""
    monkeypatch.setattr(model_checks, "varlen_kernel", lambda device: kernel)
    called = LossModel(load_base(base, torch.float32, CPU))
    enable_packing(called, probe_rows(batches, CPU))
    return called


def packing_notes(called: LossModel) -> list[tuple[str, str]]:
    job: Any = SimpleNamespace(
        loss_model=called, padded=None, recipe=SimpleNamespace(data=SimpleNamespace(packing=True))
    )
    return [line for line in _fallbacks(job) if line[0] == "packing"]


def test_a_run_uses_a_kernel_that_is_right(base: Path, batches: BatchSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    called = with_packing(base, batches, monkeypatch, calls.kernel())
    plain = with_packing(base, batches, monkeypatch, None)
    batch = collate(batches.rows, [0, 3, 7], packing=True)
    calls.windows.clear()

    loss = token_scores(called, batch).losses.sum()

    assert calls.windows == [CAUSAL] * called.model.config.num_hidden_layers  # type: ignore[union-attr]
    torch.testing.assert_close(loss, token_scores(plain, batch).losses.sum(), rtol=1e-5, atol=1e-5)
    assert called.packed_attention
    assert packing_notes(called) == packing_notes(plain) == []


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_kernel_that_is_wrong_is_not_used_and_a_run_notes_it(
    factor: float, base: Path, batches: BatchSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, enable_gqa: bool = False, **more: Any) -> Any:
        return varlen_attn(*args, enable_gqa=enable_gqa, **more) * factor

    called = with_packing(base, batches, monkeypatch, a_kernel(wrong))
    plain = with_packing(base, batches, monkeypatch, None)
    batch = collate(batches.rows, [0, 3, 7], packing=True)

    assert torch.equal(token_scores(called, batch).losses.sum(), token_scores(plain, batch).losses.sum())
    assert called.packed_attention
    assert called.kernel is None
    ((_, text),) = packing_notes(called)
    why = "rows attend one by one: the kernel that takes all at once is off by "
    assert re.fullmatch(rf"{why}(\d+(\.\d+)?|inf)% on this model", text), text


def test_a_model_that_separates_rows_by_a_mask_has_no_kernel(
    base: Path, batches: BatchSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "varlen_kernel", lambda device: a_kernel())
    called = LossModel(load_base(base, torch.float32, CPU))
    forward = called.model.forward
    called.model.forward = lambda row_lengths=None, **inputs: forward(**inputs)  # type: ignore[method-assign]

    enable_packing(called, probe_rows(batches, CPU))

    assert not called.packed_attention
    assert called.kernel is None
    assert called.kernel_problem is None


def test_a_run_notes_where_a_kernel_is_for_another_dtype(
    base: Path, batches: BatchSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = with_packing(base, batches, monkeypatch, VarlenKernel(varlen_attn))

    assert called.packed_attention
    assert called.kernel is None
    assert packing_notes(called)[0][1].endswith("does not take this model's attention, or its dtype")


# --- the kernel itself ----------------------------------------------------------------------------------------------


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("window", [CAUSAL, (3, 0)])
def test_torchs_kernel_gives_what_rows_give_one_by_one(
    dtype: torch.dtype, size: int, shared: int, window: tuple[int, int]
) -> None:
    kernel, exact = varlen_kernel(CUDA), VarlenKernel(varlen_attn, (torch.float32,))
    assert kernel is not None
    parts = [part.to(dtype).requires_grad_() for part in heads(8, 8 // shared, size, device=CUDA)]
    results = []
    for function, inputs in ((kernel, parts), (exact, [part.detach().float().requires_grad_() for part in parts])):
        output = function(*inputs, row_bounds(LENGTHS, CUDA), max(LENGTHS), window, 0.11)
        gradients = torch.autograd.grad(output.float().square().sum(), inputs)
        results.append([tensor.float() for tensor in (output.detach(), *gradients)])

    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()  # rounding to bfloat16 makes 0.007


@on_a_gpu
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2"])
def test_a_model_on_a_gpu_gives_the_outputs_and_gradients_of_rows_one_by_one(architecture: str) -> None:
    model = (qwen2() if architecture == "qwen2" else model_of(architecture)).to(CUDA, torch.bfloat16)
    enable_packed_attention(model)
    inputs = {name: tensor.to(CUDA) for name, tensor in packed_line().items()}
    outputs = []
    for kernel in (None, varlen_kernel(CUDA)):
        logits = model(**inputs, use_cache=False, row_lengths=RowLengths(LENGTHS, kernel)).logits
        gradients = torch.autograd.grad(logits.float().square().sum(), list(model.parameters()))
        outputs.append([logits.detach().float(), torch.cat([part.float().flatten() for part in gradients])])

    for one, other in zip(*outputs, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()  # rounding makes 0.005


@on_a_gpu
def test_nothing_waits_for_the_gpu_in_a_call() -> None:
    kernel = varlen_kernel(CUDA)
    assert kernel is not None
    query, key, value = (part.bfloat16() for part in heads(device=CUDA))
    kernel(query, key, value, row_bounds(LENGTHS, CUDA), max(LENGTHS), CAUSAL, None)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(query, key, value, row_bounds(LENGTHS, CUDA), max(LENGTHS), CAUSAL, None)
    finally:
        torch.cuda.set_sync_debug_mode(before)
