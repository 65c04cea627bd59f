"""The chunked loss and its gradients are those of plain cross-entropy, whatever the head."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from lorakit import inject
from lorakit.data.batch import IGNORE_INDEX, Batch
from lorakit.lora import adapter_tensors
from lorakit.objectives import cross_entropy
from lorakit.objectives.cross_entropy import LogitTransform, LossHead, LossModel, token_scores
from tests.helpers.models import SMALL, build

HEADS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama, tied": SMALL | {"tie_word_embeddings": True},
    "gemma2": SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.7},
    "granite": SMALL | {"logits_scaling": 8.0},
    "cohere": SMALL | {"logit_scale": 0.3},
    "phi": {key: value for key, value in SMALL.items() if key != "pad_token_id"},  # a head with a bias
}  # fmt: skip


def a_batch(lines: int = 2, width: int = 11) -> Batch:
    ids = torch.randint(3, 64, (lines, width), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[:, ::3] = IGNORE_INDEX
    positions = torch.arange(width).repeat(lines, 1)
    return Batch(
        ids,
        labels,
        positions,
        torch.ones_like(ids),
        (0,),
        ids.numel(),
        (int((labels != IGNORE_INDEX).sum()),),
        torch.ones(1),
    )


def plain(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 4 * 64 * 4})  # four positions


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradients_are_the_plain_ones(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.split(",")[0], **HEADS[kind]))
    for p in model.get_output_embeddings().parameters():  # logits large enough for the cap to change them
        p.data.normal_()
    inject(model, rank=3)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.3)
    tensors, batch = list(adapter_tensors(model).values()), a_batch()
    expected = plain(model, batch)
    gradients = torch.autograd.grad(expected / 7, tensors)

    called = LossModel(model)
    assert called.chunked
    loss = token_scores(called, batch).losses.sum()

    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for one, other in zip(torch.autograd.grad(loss / 7, tensors), gradients, strict=True):
        assert (one - other).norm() <= 3e-5 * other.norm()  # through a whole model, which magnifies rounding


def trained(architecture: str) -> LossModel:
    """Return a loss model with an adapter that differs from its start."""
    model = inject(build(architecture), rank=3)
    for number, tensor in enumerate(adapter_tensors(model).values()):
        tensor.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    return LossModel(model)


def test_a_micro_batch_of_labels_alone_or_of_none_has_the_same_graph() -> None:
    """Engines gather in the order of the graph, and each rank has other rows."""
    called, batch = trained("llama"), a_batch()
    graphs, losses = [], []
    for labels in (batch.labels, batch.input_ids, torch.full_like(batch.labels, IGNORE_INDEX)):
        with_positions = replace(batch, labels=labels).to(torch.device("cpu"))
        losses.append(token_scores(called, with_positions).losses.sum())
        graphs.append(nodes(losses[-1].grad_fn))
        losses[-1].backward()
        assert losses[-1] == token_scores(called, with_positions).losses.sum()
    assert graphs[0] == graphs[1] == graphs[2]
    assert losses[2] == 0


def nodes(node: Any) -> list[Any]:
    """Return the names of a graph's nodes, depth first."""
    return [] if node is None else [node.name(), *(nodes(more) for more, _ in node.next_functions)]


class CountDeviceReads(TorchDispatchMode):
    """Counts operations whose output's size depends on values: for these, Python waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool]
        by_mask = func._opname in ("index", "index_put", "index_put_", "masked_select") and masks
        self.number += bool(func._opname == "nonzero" or by_mask)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunked", [True, False])
def test_label_positions_are_not_read_from_the_device(chunked: bool) -> None:
    called, batch = LossModel(inject(build("llama"), rank=2)), a_batch()
    called.chunked = chunked
    with_positions = batch.to(torch.device("cpu"))
    losses = []
    for each, expected in ((batch, True), (with_positions, False)):
        with CountDeviceReads() as reads:
            losses.append(token_scores(called, each).losses.sum())
            losses[-1].backward()
        assert (reads.number > 0) is expected
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "transform",
    [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(cap=2.0), LogitTransform(scale=3.0, cap=1.5)],
)
def test_in_float32_it_is_the_float64_result_to_a_millionth(transform: LogitTransform) -> None:
    torch.manual_seed(0)
    linear, labels = nn.Linear(16, 64).requires_grad_(False), torch.randint(0, 64, (50,))
    hidden = torch.randn(50, 16, requires_grad=True)
    exact = hidden.detach().double().requires_grad_()
    logits = transform.scale * F.linear(exact, linear.weight.double(), linear.bias.double())
    logits = logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    expected.backward()

    loss = LossHead(linear, transform)(hidden, labels)[0].sum()
    loss.backward()

    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert hidden.grad is not None
    assert exact.grad is not None
    assert (hidden.grad - exact.grad).norm() <= 1e-6 * exact.grad.norm()


class LargestTensor(TorchDispatchMode):
    """Records the number of values of the largest tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.values = max([self.values, *(t.numel() for t in tree_leaves(results) if isinstance(t, torch.Tensor))])
        return results


def test_no_tensor_grows_with_vocabulary_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 4 * 1000 * 8})
    head = LossHead(nn.Linear(4, 1000, bias=False).requires_grad_(False), LogitTransform(cap=3.0))
    hidden = torch.randn(500, 4, requires_grad=True)
    with LargestTensor() as largest:
        head(hidden, torch.randint(0, 1000, (500,)))[0].sum().backward()
    assert largest.values == 8 * 1000


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_in_16_bits_gradients_are_as_near_as_the_dtype_allows(dtype: torch.dtype, off: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 5000, bias=False).requires_grad_(False)
    hidden, labels = torch.randn(64, 32), torch.randint(0, 5000, (64,))
    exact = hidden.double().requires_grad_()
    (F.cross_entropy(exact @ linear.weight.double().T, labels, reduction="sum") / 1000).backward()  # small gradients

    rounded = hidden.to(dtype).requires_grad_()
    (LossHead(linear.to(dtype), LogitTransform())(rounded, labels)[0].sum() / 1000).backward()

    assert rounded.grad is not None
    assert exact.grad is not None
    assert float((rounded.grad.double() - exact.grad).norm() / exact.grad.norm()) < off


@pytest.mark.parametrize(
    "settings", [{"targets": ["lm_head", "q_proj"]}, {"modules_to_save": ["lm_head"]}], ids=["adapted", "learnt"]
)
def test_a_trainable_head_has_its_loss_from_full_logits(settings: dict[str, Any]) -> None:
    model = inject(build("llama"), **settings)
    called, batch = LossModel(model), a_batch()

    assert not called.chunked
    torch.testing.assert_close(token_scores(called, batch).losses.sum(), plain(model, batch), rtol=1e-6, atol=0)


def test_a_batch_without_a_label_has_no_loss_and_no_gradient() -> None:
    model = inject(build("llama"), rank=2)
    batch = a_batch()
    batch.labels.fill_(IGNORE_INDEX)

    summed = token_scores(LossModel(model), batch).losses.sum()
    summed.backward()

    assert float(summed.detach()) == 0
    gradients = [tensor.grad for tensor in adapter_tensors(model).values()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_the_saved_bytes_do_not_depend_on_the_vocabulary() -> None:
    saved_values = []
    for vocabulary, chunks in itertools.product((1000, 4000), (True, False)):
        head = LossHead(nn.Linear(8, vocabulary, bias=False).requires_grad_(False), LogitTransform())
        hidden, labels = torch.randn(300, 8, requires_grad=True), torch.randint(0, 1000, (300,))
        sizes: list[int] = []

        def save(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            if chunks:
                head(hidden, labels)
            else:
                F.cross_entropy(F.linear(hidden, head.get_parameter("weight")), labels, reduction="sum")
        saved_values.append(sum(sizes))
    assert saved_values[0] == saved_values[2] < 300 * 10
    assert saved_values[3] > saved_values[1] > 300 * 1000


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi"])
def test_any_function_of_the_token_losses_has_the_plain_gradient(kind: str) -> None:
    torch.manual_seed(0)
    model = inject(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **HEADS[kind])), rank=3)
    for tensor in adapter_tensors(model).values():
        tensor.data.normal_(std=0.3)
    tensors, batch = list(adapter_tensors(model).values()), a_batch()
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
    selected = batch.labels != IGNORE_INDEX
    expected = F.cross_entropy(logits[selected], batch.labels[selected], reduction="none")

    scores = token_scores(LossModel(model), batch)

    torch.testing.assert_close(scores.losses, expected, rtol=1e-6, atol=0)
    assert torch.equal(scores.hits, (logits[selected].argmax(-1) == batch.labels[selected]).float())
    factors = torch.arange(1.0, len(expected) + 1) / len(expected)
    gradients = (torch.autograd.grad((factors * each).square().sum(), tensors) for each in (scores.losses, expected))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 3e-5 * other.norm()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("chunked", [True, False])
def test_of_equal_logits_the_first_token_alone_is_a_hit(chunked: bool) -> None:
    model = build("llama").requires_grad_(False)
    head = model.get_output_embeddings().weight
    head.zero_()
    loss_model = LossModel(model)
    loss_model.chunked = chunked
    batch = a_batch()
    labels = batch.labels[batch.labels != IGNORE_INDEX]
    assert token_scores(loss_model, batch).hits.sum() == 0  # no label is token 0

    with torch.no_grad():
        first = int(labels.min())
        head[first:] = 1.0  # the sum of the hidden state, positive or negative, is the logit of all tokens from it on
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    hits = token_scores(loss_model, batch).hits
    assert torch.equal(hits, (logits[batch.labels != IGNORE_INDEX].argmax(-1) == labels).float())
    assert 0 < hits.sum() <= (labels == first).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_the_sum_is_the_one_made_in_forward(dtype: torch.dtype) -> None:
    """Bit for bit: a loss of ones times a number multiplies as the number alone does."""
    hidden = torch.randn(9, 8, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    head = LossHead(nn.Linear(8, 64, bias=False).to(dtype).requires_grad_(False), LogitTransform())
    labels = torch.arange(9)
    (by_sum,) = torch.autograd.grad(head(hidden, labels)[0].sum() / 7, hidden)
    (made,) = torch.autograd.grad(head(hidden, labels)[0], hidden, torch.full((9,), 1.0) / 7)
    assert torch.equal(by_sum, made)
