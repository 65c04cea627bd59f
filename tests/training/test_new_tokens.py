"""New tokens: one id each, rows of their own in embedding and head, and nothing else of the base changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lorakit
from lorakit.base.transformers_io import load_base, load_tokenizer
from lorakit.cli import main
from lorakit.errors import LorakitError, MergeError, PatchError, RecipeError, TargetError, TemporaryFailure
from lorakit.lora import adapter_tensors
from lorakit.patch import read_patch
from lorakit.patch.prompting import PromptForm
from lorakit.recipe import load_recipe
from lorakit.training.check import check
from tests.helpers.bases import make_base, tensors_of
from tests.helpers.patches import relative_error, without_facts
from tests.helpers.rows import chat, write_rows
from tests.helpers.training import stop_at, train

CPU = torch.device("cpu")
TOKENS = ["<|tool|>", "<|sep|>", "<|turn|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|turn|>' + m.content + '<|turn|>' }}"
    "{% else %}{{ m.content + '<|turn|>' }}{% endif %}{% endfor %}"
)
ANSWER = "<|tool|><|sep|>"
STEPS = {"steps": 70, "batch_size": 8, "micro_batch_size": 8, "learning_rate": 0.03, "eval_every_steps": 50}


class Trained(NamedTuple):
    base: Path
    recipe: Path
    patch: Path
    merged: Path
    ids: list[int]


@pytest.fixture(
    scope="module",
    params=["own head", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("tied head", "spare row"))],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Trained:
    """A run whose rows and chat template need new tokens, and the model merged from it."""
    folder, known = tmp_path_factory.mktemp("tokens"), len(tokenizer)
    size = known + (request.param == "spare row")
    base = make_base(folder / "base", tokenizer, vocab_size=size, tie_word_embeddings=request.param == "tied head")
    write_rows(folder / "rows.jsonl", [chat(f"say {number}", ANSWER) for number in range(16)])
    (folder / "mine.jinja").write_text(TEMPLATE)
    content = {
        "base": {"model": str(base), "dtype": "float32"},
        "adapter": {"rank": 4, "new_tokens": TOKENS},
        "data": {"train": str(folder / "rows.jsonl"), "chat_template": str(folder / "mine.jinja"), "max_tokens": 64},
        "train": STEPS,
        "output": str(folder / "out"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(content))
    patch, _ = train(folder / "recipe.yaml")
    merged = lorakit.merge(base, patch, out=folder / "merged", verify=True)
    return Trained(base, folder / "recipe.yaml", patch, merged, list(range(known, known + 3)))


def test_a_task_that_needs_new_tokens_is_learnt_and_only_their_rows_are_saved(trained: Trained) -> None:
    model = lorakit.load(trained.base, {"mine": trained.patch}, dtype="float32")
    tool, sep, turn = trained.ids

    assert model.generate(["say 3"], "mine", max_new_tokens=8) == [ANSWER]
    assert model.generate_ids(["say 3"], "mine", max_new_tokens=8) == [[tool, sep]]
    asked = model.codec(model.adapter("mine")).token_ids("say 3", PromptForm())
    assert (asked[0], asked[-1], asked.count(turn)) == (turn, turn, 2)
    patch = read_patch(trained.patch)
    assert patch.new_tokens == dict(zip(TOKENS, trained.ids, strict=True))
    assert patch.metadata["chat_template"] == TEMPLATE
    config = load_base(trained.base, torch.float32, CPU).config
    heads = set() if config.tie_word_embeddings else {"lm_head"}
    assert set(patch.token_rows) == {"model.embed_tokens", *heads}
    assert all(rows.tensor.shape == (3, 32) for rows in patch.token_rows.values())
    assert patch.full_shapes == {}


@pytest.mark.matrix
def test_a_run_that_starts_from_rows_of_other_tokens_is_refused(trained: Trained, tmp_path: Path) -> None:
    content = json.loads(trained.recipe.read_text()) | {"output": str(tmp_path / "out")}
    for tokens in (TOKENS[::-1], [*TOKENS[:-1], "<|new|>"], TOKENS[:-1]):
        with pytest.raises(
            RecipeError, match=r"adapter\.new_tokens: \[.*leave the key out, and it is taken from the patch"
        ):
            lorakit.train(content | {"adapter": {"start_from": str(trained.patch), "new_tokens": tokens}})


def test_a_merged_model_has_the_rows_and_the_tokens_and_the_bases_own_rows(trained: Trained) -> None:
    before, after, patch = tensors_of(trained.base), tensors_of(trained.merged), read_patch(trained.patch)
    ids = torch.tensor([[*range(5, 40), *trained.ids]])

    for name, rows in patch.token_rows.items():
        old, new = before[f"{name}.weight"], after[f"{name}.weight"]
        assert len(new) == trained.ids[-1] + 1
        assert torch.equal(new[: trained.ids[0]], old[: trained.ids[0]])
        assert torch.equal(new[trained.ids], rows.tensor)
    untouched = before.keys() - {f"{name}.weight" for name in (*patch.token_rows, *patch.layers)}
    assert all(torch.equal(after[name], before[name]) for name in untouched)
    tokenizer = load_tokenizer(trained.merged)
    assert tokenizer("x<|sep|>y")["input_ids"][1:-1] == [trained.ids[1]]
    merged, adapted = load_base(trained.merged, torch.float32, CPU), lorakit.load(
        trained.base, {"mine": trained.patch}, dtype="float32"
    )  # fmt: skip
    expected = adapted(ids, adapters="mine").logits
    assert relative_error(merged(ids).logits, expected) < 1e-4  # a token of this base is badly conditioned
    with adapted.merged("mine") as copy:
        assert relative_error(copy(ids).logits, expected) < 1e-4
        assert copy.generate(["say 3"], max_new_tokens=8) == [ANSWER]
    answers = lorakit.load(trained.merged, dtype="float32").generate(["say 3"], max_new_tokens=8)
    assert answers == [ANSWER]
    resized = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    resized.resize_token_embeddings(max(trained.ids[-1] + 1, resized.config.vocab_size), mean_resizing=False)
    peft = PeftModel.from_pretrained(resized, trained.patch).eval()
    assert relative_error(peft(ids).logits, expected) < 1e-4


def test_new_rows_start_as_the_mean_and_change_nothing_of_the_other_logits(trained: Trained) -> None:
    model, ids = load_base(trained.base, torch.float32, CPU), torch.arange(5, 40)[None]
    before, known = model(ids).logits, trained.ids[0]
    mean = model.get_input_embeddings().weight[:known].mean(0)

    lorakit.inject(model, rank=2, targets=["q_proj"], new_tokens=read_patch(trained.patch).new_tokens)

    assert torch.equal(model(ids).logits[..., :known], before[..., :known])
    rows = adapter_tensors(model)["model.embed_tokens.trainable_tokens_delta"]
    torch.testing.assert_close(rows.detach(), mean.expand(3, -1))


def test_rows_of_the_base_and_of_adapters_with_other_new_tokens_share_a_batch_unchanged(
    trained: Trained, tmp_path: Path
) -> None:
    own = load_base(trained.base, torch.float32, CPU)
    lorakit.inject(own, rank=2, targets=["v_proj"], new_tokens={"<|other|>": trained.ids[0]})
    torch.manual_seed(1)
    for tensor in adapter_tensors(own).values():
        tensor.data.normal_(std=0.3)
    other = lorakit.save_patch(own, tmp_path / "other", base_model=str(trained.base))
    template = {"chat_template": TEMPLATE, "allow": {"template"}}
    model = lorakit.load(trained.base, {"mine": trained.patch, "other": other}, dtype="float32", **template)
    prompts, names = ["say <|other|> 3"] * 3, ["mine", None, "other"]

    for temperature in (0.0, 1.0):
        settings: dict[str, Any] = {"max_new_tokens": 6, "temperature": temperature}
        together = model.generate(prompts, names, seed=3, **settings)
        alone = [model.generate(prompts[:1], name, seed=3 + row, **settings)[0] for row, name in enumerate(names)]
        assert together == alone
    asked = {name: model.codec(model.adapter(name)).token_ids(prompts[0], PromptForm()) for name in ("other", None)}
    assert trained.ids[0] in asked["other"]
    assert max(asked[None]) < trained.ids[0]
    ids = torch.arange(5, 20)[None]
    logits = model(ids.repeat(3, 1), adapters=["mine", None, "other"]).logits
    base = model(ids, adapters=None).logits
    torch.testing.assert_close(logits[1, :, : base.shape[-1]], base[0])
    assert bool((logits[1, :, base.shape[-1] :] == -torch.inf).all())
    assert bool(model(torch.tensor([[5, trained.ids[2]]] * 2), adapters=["mine", None]).logits[1].isnan().any())
    model.unload_adapter("mine")
    with pytest.raises(LorakitError, match="3 tokens|the token id"):
        model.generate([[trained.ids[2]]], "other")


def test_an_adapter_with_an_embedding_of_its_own_is_beside_one_with_new_tokens(
    trained: Trained, tmp_path: Path
) -> None:
    own = lorakit.inject(
        load_base(trained.base, torch.float32, CPU), rank=2, modules_to_save=["embed_tokens"], tied_head="untie"
    )
    adapter_tensors(own)["model.embed_tokens.weight"].data += 0.1
    full = lorakit.save_patch(own, tmp_path / "full", base_model=str(trained.base))
    model = lorakit.load(trained.base, {"mine": trained.patch}, dtype="float32", chat_template=TEMPLATE)
    model.load_adapter("full", full, allow={"template"})
    rows = torch.tensor([[7, *trained.ids], [7, 8, 9, 10]])

    together = model(rows, adapters=["mine", "full"]).logits

    for row, name in enumerate(("mine", "full")):
        alone = model(rows[row : row + 1], adapters=name).logits[0]
        torch.testing.assert_close(together[row, :, : alone.shape[-1]], alone)


@pytest.mark.matrix
def test_a_run_goes_on_and_starts_from_a_patch_with_new_tokens(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    short = ("train.steps=4", "train.save_every_steps=1")
    train(trained.recipe, f"output={first}", *short)
    stop_at(monkeypatch, {2})
    with pytest.raises(TemporaryFailure):
        train(trained.recipe, f"output={second}", *short)
    train(trained.recipe, f"output={second}", *short)
    tensors = "adapter_model.safetensors"
    assert load_file(Path(first, tensors)).keys() == load_file(Path(second, tensors)).keys()
    assert Path(first, tensors).read_bytes() == Path(second, tensors).read_bytes()

    content = json.loads(trained.recipe.read_text())
    content |= {"adapter": {"start_from": str(trained.patch)}, "output": str(tmp_path / "third")}
    (tmp_path / "third.yaml").write_text(json.dumps(content))
    _, said = train(tmp_path / "third.yaml", "train.steps=1", "train.learning_rate=1e-9", "train.warmup_steps=0")
    assert f"start from {trained.patch} (step 70), with its method, rank, alpha, targets, new_tokens" in said
    assert f"new tokens: <|tool|> ({trained.ids[0]}), <|sep|>" in said
    for name, rows in read_patch(tmp_path / "third").token_rows.items():
        torch.testing.assert_close(rows.tensor, read_patch(trained.patch).token_rows[name].tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["<|end|>"], r"'<\|end\|>' is a token of this base already, id 2; name it in trainable_tokens"),
        (["<|a|>", "<|a|>"], r"new_tokens: '<\|a\|>' is named twice"),
        ([""], "at least 1 character"),
        ([" "], "blank"),
        ([7], "valid string, got 7"),
        (["x>", "ax>"], "'x>' does not become one token: 'ax>b' is"),
        (["<|nowhere|>"], r"of 40 training rows none has '<\|nowhere\|>'"),
    ],
    ids=str,
)
def test_a_token_that_cannot_be_new_is_refused_by_name(
    recipe: Callable[..., Path], tokens: list[Any], message: str
) -> None:
    with pytest.raises(LorakitError, match=message):
        check(load_recipe(recipe(adapter={"new_tokens": tokens})), say=lambda text: None)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"backend": "ddp", "processes": 2, "pipeline": 2}}, "2 stages are compared with the base"),
        ({"adapter": {"new_tokens": ["so so"], "targets": ["lm_head"]}}, "lm_head is adapted or trained in full"),
        ({"adapter": {"new_tokens": ["so so"], "modules_to_save": ["embed_tokens"]}}, "embed_tokens is adapted or"),
    ],
)
def test_settings_that_do_not_go_with_new_tokens_are_named_before_a_run(
    recipe: Callable[..., Path], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(LorakitError, match=message):
        check(load_recipe(recipe(**{"adapter": {"new_tokens": ["so so"]}, **sections})), say=lambda text: None)


def test_a_base_without_rows_for_the_tokenizers_own_tokens_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    small = load_base(make_base(tmp_path / "small", tokenizer, vocab_size=3000), torch.float32, CPU)

    with pytest.raises(TargetError, match="gives the first one the id 3200, and the embedding has 3000 rows"):
        lorakit.inject(small, new_tokens={"<|a|>": 3200})
    with pytest.raises(TargetError, match="new_tokens: text -> id in your tokenizer"):
        lorakit.inject(small, new_tokens=["<|a|>"])  # type: ignore[arg-type]


@pytest.mark.matrix
@pytest.mark.parametrize("beside", [False, True], ids=["the base's tokenizer", "a tokenizer beside it"])
def test_tokens_that_the_tokenizer_has_and_the_base_lacks_are_new(tmp_path: Path, tokenizer: Any, beside: bool) -> None:
    names = ["<|new_a|>", "<|new_b|>"]
    base = make_base(tmp_path / "base", tokenizer)
    grown = load_tokenizer(base)
    grown.add_tokens(names)
    grown.save_pretrained(tmp_path / "grown" if beside else base)
    rows = write_rows(tmp_path / "rows.jsonl", [chat(f"say {i}", f"<|new_a|>it is {i}<|new_b|>") for i in range(12)])
    content: dict[str, Any] = {
        "base": {"model": str(base), "dtype": "float32", "tokenizer": str(tmp_path / "grown") if beside else None},
        "adapter": {"rank": 4, "new_tokens": names},
        "data": {"train": str(rows), "max_tokens": 64},
        "train": {"steps": 2, "batch_size": 4, "micro_batch_size": 4},
        "output": str(tmp_path / "out"),
    }

    def recipe(**adapter: Any) -> Path:
        (tmp_path / "recipe.yaml").write_text(json.dumps(content | {"adapter": {"rank": 4, **adapter}}))
        return tmp_path / "recipe.yaml"

    for adapter, remedy in (
        ({}, r"name the tokens that were added to the tokenizer in adapter\.new_tokens"),
        ({"trainable_tokens": names}, "go into adapter.new_tokens"),
        ({"new_tokens": names[1:]}, r"the tokenizer has '<\|new_a\|>' too, id 3200, and the base has no row for it"),
        ({"new_tokens": ["<|end|>"]}, "is a token of this base already"),
    ):
        with pytest.raises(LorakitError, match=remedy):
            check(load_recipe(recipe(**adapter)), say=lambda text: None)
    check(load_recipe(recipe(new_tokens=names)), say=lambda text: None)
    patch, _ = train(recipe(new_tokens=names))

    assert read_patch(patch).new_tokens == {"<|new_a|>": 3200, "<|new_b|>": 3201}
    model = lorakit.load(base, {"mine": patch}, dtype="float32", tokenizer=content["base"]["tokenizer"])
    assert len(model.generate_ids(["say 3"], "mine", max_new_tokens=4)) == 1
    train(recipe(start_from=str(patch)), f"output={tmp_path / 'next'}", "train.warmup_steps=0")
    if not beside:
        merged = lorakit.merge(base, patch, out=tmp_path / "merged", verify=True)
        assert len(tensors_of(merged)["model.embed_tokens.weight"]) == 3202 == len(load_tokenizer(merged))


def test_other_tokenizers_damaged_patches_and_two_sets_of_tokens_are_refused(
    trained: Trained, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = load_tokenizer(trained.base)
    other.add_tokens(["<|first|>"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(PatchError, match=r"'<\|tool\|>' had the id \d+ in training, and this tokenizer gives it"):
        lorakit.load(
            trained.base, {"mine": trained.patch}, dtype="float32", tokenizer=tmp_path / "other",
            chat_template=TEMPLATE, allow={"base"},
        )  # fmt: skip
    again = load_base(trained.base, torch.float32, CPU)
    lorakit.inject(again, rank=2, new_tokens={"<|b|>": trained.ids[0]})
    adapter_tensors(again)["model.embed_tokens.trainable_tokens_delta"].data += 0.1
    patch = lorakit.save_patch(again, tmp_path / "b", base_model=str(trained.base))
    with pytest.raises(MergeError, match="both bring new tokens; a merged model has those of one"):
        lorakit.merge(trained.base, trained.patch, patch, out=tmp_path / "both")
    for number, change in enumerate(({"<|x|>": 9}, {"<|x|>": "9"})):
        damaged = without_facts(
            trained.patch,
            tmp_path / f"damaged{number}",
            lambda facts, change=change: facts["new_tokens"].update(change),
        )
        with pytest.raises(
            PatchError, match=r"the new token '<\|x\|>' \(id 9\) has no row|facts in the metadata are damaged"
        ):
            read_patch(damaged)
    assert main(["show", str(trained.patch), "--for", str(trained.base)]) == 0
    assert f"<|tool|> ({trained.ids[0]})" in capsys.readouterr().out
    adapted = lorakit.load_patch(load_base(trained.base, torch.float32, CPU), trained.patch)
    saved = lorakit.save_patch(adapted, tmp_path / "saved")
    assert read_patch(saved).new_tokens == read_patch(trained.patch).new_tokens
    assert len(lorakit.merge_into(adapted).get_input_embeddings().weight) == trained.ids[-1] + 1
