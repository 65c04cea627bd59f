"""Download files from the hub and upload files to it, through huggingface_hub, with one-line errors.

Tokens are huggingface_hub's concern: no message or file here has one. Imports no torch.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lorakit.errors import HubError, TemporaryFailure, translate_error
from lorakit.files.progress import library_call

LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"
REPOSITORY: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
REASON_LETTERS: Final = 300
SILENCE_SECONDS: Final = 60.0  # of the hub, in a request that huggingface_hub gives no limit
TRY_LATER: Final = (408, 409, 412, 429)
"""besides 5xx: statuses after which the same request may succeed; 409 and 412 are another commit at the same time"""


def is_repository_name(name: str) -> bool:
    """True for text of the form ORGANISATION/NAME."""
    return REPOSITORY.fullmatch(name) is not None


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return a repository's folder in the user's cache, downloaded if not there. Raises HubError if that fails."""
    from huggingface_hub import snapshot_download

    with translate_error(TemporaryFailure, HubError), _one_line_errors(name, writes=False), library_call():
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))


def is_path(name: str) -> bool:
    """True for a name that means a file or folder of this machine: absolute, of a home folder, or with dots."""
    return name.startswith(("/", "~", "./", "../")) or name in (".", "..")


def check_push(name: str, what: str, recorded_base: str | None, base: str | None, flag: str = "--base") -> None:
    """Raise HubError unless a patch, ``what``, can be pushed: to a repository's name, with a base that others find."""
    if not is_repository_name(name):
        raise HubError(f"{name!r}: a repository of the hub is named as ORGANISATION/NAME")
    if base is None and recorded_base is not None and (is_path(recorded_base) or Path(recorded_base).is_dir()):
        remedy = f"name it as others find it: {flag} ORGANISATION/NAME (or {flag} with that path, to publish the path)"
        raise HubError(f"{what}: names its base by a path of this machine, {recorded_base}; {remedy}")


def open_repository(name: str, *, private: bool) -> None:
    """Make a repository if there is none. Raises HubError: no token that may write into it; TemporaryFailure."""
    import huggingface_hub
    from huggingface_hub import utils

    if huggingface_hub.get_token() is None:
        raise HubError(f"{name}: the hub needs a token with write access; {LOGIN}")
    api = huggingface_hub.HfApi()
    with _one_line_errors(name, writes=True):
        # None is public, or private where the organisation's setting is that
        api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:  # it existed, and `exist_ok` leaves it as it was
            raise HubError(f"{name}: exists and is public; make it private on the hub, or choose another name")
        # as `HfApi.auth_check(write=True)` of later versions: `exist_ok` passes repositories of others too
        address = f"{api.endpoint}/api/models/{name}/auth-check/write"
        reply = utils.get_session().get(address, headers=utils.build_hf_headers())  # type: ignore[attr-defined]
        utils.hf_raise_for_status(reply)  # type: ignore[attr-defined]


def upload(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Upload all files of a folder in one commit, and return its address. Raises as ``open_repository``."""
    import huggingface_hub

    open_repository(name, private=private)
    with _one_line_errors(name, writes=True):
        commit = huggingface_hub.HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return str(commit.commit_url)


def connection_failure(name: str, problem: BaseException) -> HubError | TemporaryFailure | None:
    """Return the error for a refusal of the hub or a broken connection behind ``problem``; None for anything else."""
    from huggingface_hub import errors

    if isinstance(problem, errors.OfflineModeIsEnabled):  # no connection was tried
        return None
    broken = (_client_error(), ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)
    first = next((each for each in _causes(problem, hidden=True) if isinstance(each, broken)), None)
    return None if first is None else _explained(name, first, writes=False)


def _client_error() -> type[Exception]:
    """Return the base of all errors of huggingface_hub's client: of httpx, or of httpx2 after version 2.0."""
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__bases__[0]


@contextmanager
def _one_line_errors(name: str, *, writes: bool) -> Iterator[None]:
    """Turn the errors of huggingface_hub into those of lorakit, and a hub's silence into one."""
    from huggingface_hub import utils

    hooks: list[Any] = utils.get_session().event_hooks["request"]  # type: ignore[attr-defined]
    if _limit_silence not in hooks:
        hooks.append(_limit_silence)
    broken = (_client_error(), OSError, RuntimeError, ValueError)
    try:
        yield
    except broken as problem:
        raise _explained(name, problem, writes=writes) from None


def _limit_silence(request: Any) -> None:
    limits: dict[str, float | None] = request.extensions["timeout"]
    limits |= {of: SILENCE_SECONDS for of, seconds in limits.items() if seconds is None}


def _explained(name: str, problem: BaseException, *, writes: bool) -> HubError | TemporaryFailure:
    causes = _causes(problem)
    codes = (getattr(getattr(each, "response", None), "status_code", None) for each in causes)
    status = next((code for code in codes if isinstance(code, int)), None)
    said = (str(getattr(each, "server_message", None) or each).strip() or type(each).__name__ for each in causes)
    texts = [text.splitlines()[0][:REASON_LETTERS] for text in said]
    nothing = "; nothing was committed, and the same command tries again" if writes else ""
    what = "may not write there" if writes else "may not read it"
    no_token = "your token is not accepted" if writes else "no such repository, or it is private and your token missing"
    refusals = {
        401: f"{no_token} (401); {LOGIN}",
        403: f"the hub says that your token {what} (403): {texts[0]}",
        404: "the hub has no such repository or revision, or does not show it to you (404)",
    }
    if status is not None and status < 500 and status not in TRY_LATER:
        return HubError(f"{name}: {refusals.get(status, f'the hub refused ({status}): {texts[0]}')}")
    if status is not None:
        return TemporaryFailure(f"{name}: the hub could not answer ({status}){nothing}")
    if isinstance(problem, ValueError):  # of names and of the card, which huggingface_hub checks
        return HubError(f"{name}: {' '.join(str(problem).split())[:REASON_LETTERS]}")
    return TemporaryFailure(f"{name}: the hub was not reached, or the connection broke: {texts[-1]}{nothing}")


def _causes(problem: BaseException, *, hidden: bool = False) -> list[BaseException]:
    """Return an error, the one it came from, and so on. ``hidden``: also where the library does not show that one."""
    causes = [problem]
    while (cause := causes[-1].__cause__ or (causes[-1].__context__ if hidden else None)) is not None:
        causes.append(cause)
    return causes
