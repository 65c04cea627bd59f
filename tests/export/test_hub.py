"""Patches pushed to a hub and loaded from it, with huggingface_hub's real client and a small hub on this machine."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

import lorakit
from lorakit.base.find import find_base
from lorakit.cli import main
from lorakit.errors import BaseModelError, HubError, PatchError, TemporaryFailure
from lorakit.export.hub import push_patch
from lorakit.patch import read_patch
from lorakit.patch.find import find_patch
from tests.helpers.hub import TOKEN, Hub, serving_hub
from tests.helpers.patches import make_embedding_patch, make_patch, without_facts
from tests.helpers.training import train

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own call
FILES = {"adapter_model.safetensors", "adapter_config.json", "lorakit.json", "README.md"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of this test's own, to which the client is pointed as by HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN."""
    with serving_hub() as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, in compiled code
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the client, between its tries
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_ENDPOINT", raising=False)
        yield hub


@pytest.fixture
def patch(base: Path, tmp_path: Path) -> Path:
    return make_patch(base, tmp_path / "patch")


def files_of(hub: Hub, name: str) -> dict[str, bytes]:
    return hub.repositories[name].commits[-1][2]


def test_a_pushed_patch_is_loaded_by_its_name_and_computes_the_same(hub: Hub, patch: Path, base: Path) -> None:
    address = push_patch(patch, "org/mine", base="org/base", message="first")
    assert address.startswith(f"{hub.address}/org/mine/commit/")
    assert set(files_of(hub, "org/mine")) == FILES
    assert [message for _, message, _ in hub.repositories["org/mine"].commits] == ["first"]

    model = lorakit.load(base, adapters={"here": patch, "hub": "org/mine"}, dtype="float32")
    ids = torch.arange(4, 20)[None]
    assert torch.equal(model(ids, adapters="here").logits, model(ids, adapters="hub").logits)


def test_a_patch_of_embeddings_brings_how_they_are_pooled_and_its_tokenizer(
    hub: Hub, base: Path, tmp_path: Path
) -> None:
    patch = make_embedding_patch(base, tmp_path / "embedding")
    (patch / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    (patch / "notes.txt").write_text("mine")
    push_patch(patch, "org/mine", base="org/base")
    assert set(files_of(hub, "org/mine")) == FILES | {"modules.json", "1_Pooling/config.json", "tokenizer.json"}

    model = lorakit.load(base, adapters={"here": patch, "hub": "org/mine"}, dtype="float32")
    assert torch.equal(model.embed(["hi"], "here"), model.embed(["hi"], "hub"))


def test_a_revision_stays_what_it_was(hub: Hub, base: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        push_patch(make_patch(base, tmp_path / str(seed), seed=seed), "org/mine", base="org/base")
    first = hub.repositories["org/mine"].commits[0][0]
    tensors = [read_patch(find_patch(name)) for name in (f"org/mine@{first}", "org/mine")]
    for seed, loaded in enumerate(tensors):
        name, layer = next(iter(read_patch(tmp_path / str(seed)).layers.items()))
        assert torch.equal(layer.tensors["lora_A"], loaded.layers[name].tensors["lora_A"])
    with pytest.raises(PatchError, match="no such repository or revision"):
        find_patch("org/mine@absent")


def test_no_path_of_this_machine_is_pushed(hub: Hub, patch: Path, base: Path, tmp_path: Path) -> None:
    def add_paths(facts: dict[str, Any]) -> None:
        facts["recipe"] = {
            "base": {"model": str(base), "tokenizer": "/home/me/words"},
            "data": {"train": ["rows.jsonl"]},
        }
        facts["combined"] = [{"name": "~/other/patch"}]

    copy = without_facts(patch, tmp_path / "facts", add_paths)
    card = (copy / "README.md").read_text()
    assert str(base) in card
    (copy / "README.md").write_text(
        f'{card}\nMine, of {base}. {{"nvme_path": "/mnt/fast", "also": "/home/me/words"}}\n'
    )
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    push_patch(copy, "org/mine", base="org/base")

    pushed = files_of(hub, "org/mine")
    for name, content in pushed.items():
        for path in (str(base), str(base.parent), "/home/me", "/mnt/", "~/"):
            assert path.encode() not in content, (name, path)
    text = pushed["README.md"].decode()
    assert "base_model: org/base" in text
    assert 'Mine, of org/base. {"nvme_path": "fast", "also": "words"}' in text
    assert json.loads(pushed["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    facts = read_patch(find_patch("org/mine")).metadata
    assert facts["recipe"]["base"] == {"model": "org/base", "tokenizer": "words"}
    assert facts["combined"] == [{"name": "patch"}]
    assert facts["base"]["model"] == "org/base" if "model" in facts["base"] else True
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_a_base_named_by_a_path_is_refused_until_it_gets_a_name(hub: Hub, patch: Path, base: Path) -> None:
    with pytest.raises(HubError, match=r"by a path of this machine, .*: --base ORGANISATION/NAME"):
        push_patch(patch, "org/mine")
    assert hub.requests == []
    push_patch(patch, "org/mine", base=str(base))  # where somebody wants it
    assert str(base) in files_of(hub, "org/mine")["adapter_config.json"].decode()


def test_a_base_that_is_a_folder_here_is_no_name_for_others(
    hub: Hub, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent.parent)
    patch = make_patch(base.relative_to(Path.cwd()), tmp_path / "patch")
    with pytest.raises(HubError, match=rf"a path of this machine, {base.relative_to(Path.cwd())};"):
        push_patch(patch, "org/mine")


def test_a_card_names_no_base_that_the_hub_refuses(hub: Hub, patch: Path) -> None:
    push_patch(patch, "org/mine", base="builtin:tiny")
    text = files_of(hub, "org/mine")["README.md"].decode()
    assert "base_model" not in text.partition("\n---\n")[0]
    assert "library_name: peft" in text
    assert '"builtin:tiny"' in text


def test_only_the_files_of_the_patch_are_pushed(hub: Hub, patch: Path) -> None:
    for name in ("run.json", "metrics.jsonl", "secret.txt"):
        (patch / name).write_text("{}")
    push_patch(patch, "org/mine", base="org/base")
    assert set(files_of(hub, "org/mine")) == FILES


def test_private_makes_a_private_repository_and_refuses_a_public_one(hub: Hub, patch: Path) -> None:
    push_patch(patch, "org/hidden", base="org/base", private=True)
    assert hub.repositories["org/hidden"].private
    push_patch(patch, "org/hidden", base="org/base", private=True)
    push_patch(patch, "org/open", base="org/base")
    assert not hub.repositories["org/open"].private
    with pytest.raises(HubError, match="exists and is public"):
        push_patch(patch, "org/open", base="org/base", private=True)
    assert len(hub.repositories["org/open"].commits) == 1


@pytest.mark.parametrize(
    ("request_start", "status", "kind", "message"),
    [
        ("POST /api/repos", 401, HubError, r"your token is not accepted \(401\); log in with `hf auth login`"),
        ("POST /api/repos", 403, HubError, r"your token may not write there \(403\): refused once"),
        ("POST /api/models/org/mine/commit", 404, HubError, "no such repository or revision"),
        ("POST /api/models/org/mine/preupload", 400, HubError, r"refused \(400\): refused once"),
        ("POST /api/models/org/mine/commit", 409, TemporaryFailure, r"could not answer \(409\); nothing was committed"),
        ("POST /api/models/org/mine/commit", 500, TemporaryFailure, r"could not answer \(500\); nothing was committed"),
        ("PUT /store", 503, TemporaryFailure, r"could not answer \(503\); nothing was committed"),
    ],
)
def test_a_refusal_says_what_to_do_and_commits_nothing(
    hub: Hub, patch: Path, request_start: str, status: int, kind: type[Exception], message: str
) -> None:
    hub.refuse = {request_start: status}
    with pytest.raises(kind, match=message) as caught:
        push_patch(patch, "org/mine", base="org/base")
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not any(repository.commits for repository in hub.repositories.values())


@pytest.mark.parametrize("cut", ["POST /api/repos", "PUT /store", "POST /api/models/org/mine/commit"])
def test_a_connection_that_breaks_commits_nothing_and_the_same_call_works_later(
    hub: Hub, patch: Path, cut: str
) -> None:
    hub.cut = cut
    with pytest.raises(TemporaryFailure, match=r"connection broke: .*; nothing was committed, and the same"):
        push_patch(patch, "org/mine", base="org/base")
    assert not any(repository.commits for repository in hub.repositories.values())
    hub.cut = None
    push_patch(patch, "org/mine", base="org/base")
    assert set(files_of(hub, "org/mine")) == FILES


def test_without_a_token_nothing_is_sent(hub: Hub, patch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(huggingface_hub.constants, "HF_STORED_TOKENS_PATH", "/nowhere")
    with pytest.raises(HubError, match="needs a token with write access; log in with `hf auth login`, or set HF_TOKEN"):
        push_patch(patch, "org/mine", base="org/base")
    assert hub.requests == []


@pytest.mark.parametrize("name", ["mine", "a/b/c", "org/..", "org/mine@main", "-/x"])
def test_a_name_that_is_no_repository_is_refused(hub: Hub, patch: Path, name: str) -> None:
    with pytest.raises(HubError, match="is named as ORGANISATION/NAME"):
        push_patch(patch, name, base="org/base")
    assert not hub.repositories


def test_a_damaged_patch_is_not_pushed(hub: Hub, patch: Path) -> None:
    path = patch / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PatchError):
        push_patch(patch, "org/mine", base="org/base")
    assert hub.requests == []


def test_what_the_hub_does_not_give_is_an_error_that_says_where_was_searched(hub: Hub, patch: Path) -> None:
    push_patch(patch, "org/hidden", base="org/base", private=True)
    with pytest.raises(PatchError, match=rf"no folder {Path.cwd()}/org/absent; on the hub: .* no such repository"):
        find_patch("org/absent")
    hub.repositories["org/model"] = repository = type(hub.repositories["org/hidden"])()
    repository.commit("a model", {"config.json": b"{}"})
    with pytest.raises(PatchError, match=r"no patch that lorakit reads: it has no adapter_config\.json"):
        find_patch("org/model")
    repository.commit("a pickle", {"adapter_config.json": b"{}", "adapter_model.bin": b""})
    with pytest.raises(PatchError, match=r"it has no adapter_model\.safetensors"):
        find_patch("org/model@main")
    with pytest.raises(BaseModelError, match="the hub gave no 'org/absent'"):
        find_base("org/absent")


def test_a_hub_that_is_down_gives_what_was_downloaded_before(
    hub: Hub, patch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_patch(patch, "org/mine", base="org/base")
    folder = find_patch("org/mine")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_patch("org/mine") == folder
    with pytest.raises(PatchError, match="on the hub: org/other: "):
        find_patch("org/other")
    with pytest.raises(TemporaryFailure, match="the hub was not reached"):
        push_patch(patch, "org/mine", base="org/base")


def test_a_hub_that_takes_a_request_and_never_answers_is_named(
    hub: Hub, patch: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lorakit.files.hub, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PatchError, match="org/mine: the hub was not reached, or the connection broke: .*timed out"):
            find_patch("org/mine")
        with pytest.raises(TemporaryFailure, match=r"timed out; nothing was committed"):
            push_patch(patch, "org/mine", base="org/base")


def test_a_mistyped_path_is_not_searched_on_the_hub(
    hub: Hub, patch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    with pytest.raises(PatchError, match="adapters/mine: no such folder"):
        read_patch(find_patch("adapters/mine"))
    assert find_patch(Path("org/mine")) == Path("org/mine")
    assert find_patch("patch") == Path("patch")
    assert hub.requests == []


def test_the_token_is_in_no_output_and_in_no_file(hub: Hub, patch: Path, tmp_path: Path) -> None:
    """The command in a process of its own, which reads HF_ENDPOINT."""
    hub.refuse = {"POST /api/models/closed": 403}
    cache = tmp_path / "home"
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    calls = "; ".join(
        f"print('code', main(['push', {str(patch)!r}, '{name}', '--base', 'org/base', '--private']))"
        for name in ("org/mine", "closed/mine")
    )
    code = f"from lorakit.cli import main; {calls}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"pushed: {hub.address}/org/mine/commit/" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 0", "code 2"]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lorakit push: closed/mine: the hub says that your token may not write there (403): refused")
    assert TOKEN not in done.stdout + done.stderr
    for file in (*patch.rglob("*"), *cache.rglob("*")):
        assert file.is_dir() or TOKEN.encode() not in file.read_bytes()
    assert all(TOKEN.encode() not in content for content in files_of(hub, "org/mine").values())


def test_a_finished_run_is_pushed_and_one_whose_push_fails_is_kept_with_the_command_to_repeat(
    hub: Hub, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(recipe(data={"eval": None}, train={"steps": 2, "warmup_steps": 0})), tmp_path / "out"
    command = ["train", path, "--push", "org/mine", "--push-base", "org/base", "--push-private"]

    hub.refuse = {"POST /api/models/org/mine/commit": 500}
    assert main(command) == 75
    err = capsys.readouterr().err
    assert "the hub could not answer (500); nothing was committed" in err
    again = f"lorakit push {out} org/mine --base org/base --private"
    assert f"The run is finished, and its patch is in {out}. To push it: {again}" in err
    assert read_patch(out).layers
    assert not hub.repositories["org/mine"].commits

    hub.refuse = {}
    assert main(again.split()[1:]) == 0
    assert main(command) == 0  # the run is not trained again
    said = capsys.readouterr().out
    assert "trained already" in said
    assert f"pushed     {hub.address}/org/mine/commit/" in said
    assert set(files_of(hub, "org/mine")) == FILES
    assert hub.repositories["org/mine"].private
    assert len(hub.repositories["org/mine"].commits) == 2


@pytest.mark.parametrize(
    ("options", "refused", "code", "message"),
    [
        (["--push", "mine"], {}, 2, "'mine': a repository of the hub is named as ORGANISATION/NAME"),
        (["--push", "org/mine"], {}, 2, "names its base by a path of this machine, .*: --push-base ORGANISATION/NAME"),
        (["--push", "org/mine", "--push-base", "b/c"], {"POST /api/repos": 403}, 2, r"may not write there \(403\)"),
        (
            ["--push", "org/mine", "--push-base", "b/c"],
            {"GET /api/models/org/mine/auth": 403},
            2,
            "may not write there",
        ),
        (["--push", "org/mine", "--push-base", "b/c"], {"POST /api/repos": 503}, 75, r"could not answer \(503\)"),
        (["--push-private"], {}, 2, "--push-private: goes with --push ORGANISATION/NAME"),
    ],
)
def test_a_push_that_is_not_possible_is_refused_before_the_training(
    hub: Hub, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: list[str], refused: dict[str, int], code: int, message: str,
) -> None:  # fmt: skip
    hub.refuse = refused
    assert main(["train", str(recipe()), *options]) == code
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_run_starts_from_a_repository(hub: Hub, patch: Path, recipe: Any) -> None:
    push_patch(patch, "org/mine", base="org/base")
    steps = {"steps": 1, "warmup_steps": 0, "batch_size": 2, "micro_batch_size": 2, "learning_rate": 1e-12}
    out, said = train(recipe(adapter={"start_from": "org/mine"}, train=steps))
    assert "start from org/mine" in said
    name, layer = next(iter(read_patch(patch).layers.items()))
    assert torch.allclose(read_patch(out).layers[name].tensors["lora_B"], layer.tensors["lora_B"])


def test_every_command_with_adapters_takes_a_repository(
    hub: Hub, patch: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push_patch(patch, "org/mine", base="org/base")
    prompt = ["--prompt", "a", "--max-new-tokens", "2", "--dtype", "float32"]
    assert main(["generate", str(base), "--adapter", "a=org/mine", *prompt]) == 0
    assert main(["show", "org/mine", "--for", str(base)]) == 0
    assert "fits " in capsys.readouterr().out
    assert main(["merge", str(base), "org/mine:0.5", "--out", str(tmp_path / "merged")]) == 0
    other = make_patch(base, tmp_path / "other", seed=1)
    assert main(["merge", "--as-patch", "org/mine@main", str(other), "--out", str(tmp_path / "sum")]) == 0
    for command in (
        ["generate", *prompt, str(base), "--adapter", "a=org/absent"],
        ["serve", str(base), "--adapter", "a=org/absent"],
        ["export", "--vllm", str(base), "--adapter", "a=org/absent"],
        ["show", "org/absent", "--for", str(base)],
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert "on the hub: org/absent: " in capsys.readouterr().err
