"""Python processes that start in a tenth of a second: forks of one process that has imported torch and lorakit already.

`run_python` and `start_python` behave as `subprocess.run` and `subprocess.Popen` of ``[sys.executable, *arguments]``.
A fork shares nothing with pytest: it has the given environment, folder, streams, a session and default signals of its
own. When lorakit's launcher runs in such a process, its workers are forked too, as its children. A process changes its
environment by itself, so /proc/PID/environ shows that of the server.

Not for tests of memory (pages of the server count as the child's), nor of the start itself, nor of ``PYTHON*``
variables: those start a real ``sys.executable``.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from types import TracebackType
from typing import IO, Any, Final, NoReturn

ROOT: Final = Path(__file__).parents[2]
PRELOADED: Final = (
    "accelerate.state", "bitsandbytes", "datasets", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.superoffload.superoffload_stage3",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "pyarrow.parquet", "setuptools", "tests.helpers.ranks",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""Libraries' modules that a training process imports; with every module of lorakit, imported before the first fork."""
FORKED: Final = ("lorakit.cli", "tests.helpers.ranks")
"""Modules that a forked process forks for itself when it starts ``sys.executable -m MODULE``."""
MESSAGE_BYTES: Final = 1 << 18


# --- in pytest ------------------------------------------------------------------------------------------------------


class ForkedProcess:
    """A process of the fork server, with the methods of `subprocess.Popen`."""

    def __init__(
        self, arguments: Sequence[str], status: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None
    ) -> None:
        self.args, self.stdout, self.stderr = list(arguments), stdout, stderr
        self.returncode: int | None = None
        self._status = status
        self.pid = self._receive()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self._status.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._receive_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self._receive_code()
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends and wait. A stream that is no pipe gives an empty text."""
        until = None if timeout is None else time.monotonic() + timeout
        texts: dict[int, str] = {}

        def read(number: int, stream: IO[str]) -> None:
            texts[number] = stream.read()

        streams = [(number, stream) for number, stream in enumerate((self.stdout, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=stream, daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
        if any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        for _, stream in streams:
            stream.close()
        self.wait(None if until is None else max(0.01, until - time.monotonic()))
        return texts.get(0, ""), texts.get(1, "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """SIGKILL to the process and to whatever it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> "ForkedProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.kill_group()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def _receive_code(self) -> None:
        self.returncode = self._receive()
        self._status.close()

    def _receive(self) -> int:
        data = self._status.recv(MESSAGE_BYTES)
        if not data:
            raise RuntimeError("the fork server has gone")
        return int(data)


def start_python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> ForkedProcess:
    """Start ``python -m MODULE ...`` or ``python -c CODE ...``; streams and defaults as for `subprocess.Popen`."""
    texts = [str(argument) for argument in arguments]
    with contextlib.ExitStack() as own:  # the ends that only the child needs

        def output(wanted: int | None, number: int) -> tuple[int, IO[str] | None]:
            if wanted != PIPE:
                return number if wanted is None else _file(wanted, own), None
            reading, writing = os.pipe()
            own.callback(os.close, writing)
            return writing, open(reading, errors="replace")

        out, out_reader = output(stdout, 1)
        err, err_reader = (out, None) if stderr == STDOUT else output(stderr, 2)
        status, reported = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.callback(reported.close)
        request = {"arguments": texts, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        fds = [reported.fileno(), _file(stdin, own), out, err]
        socket.send_fds(_server(), [json.dumps(request).encode()], fds)
    return ForkedProcess(["python", *texts], status, out_reader, err_reader)


def run_python(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run it to its end and return its exit code, standard output and standard error.

    Raises:
        subprocess.TimeoutExpired: it ran longer; its process group is killed.
    """
    with start_python(*arguments, cwd=cwd, env=env, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def _file(wanted: int, own: contextlib.ExitStack) -> int:
    if wanted != DEVNULL:
        return wanted
    nowhere = os.open(os.devnull, os.O_RDWR)
    own.callback(os.close, nowhere)
    return nowhere


@functools.cache
def _server() -> socket.socket:
    """The socket of this process's server, which is started at the first call and ends when pytest does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())], cwd=ROOT, env=environment, stdin=DEVNULL,
            stdout=DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- in the server --------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Fork a child for every request, and report its process id and its exit code; kill all when pytest has gone."""
    gc.collect()
    gc.freeze()  # a collection in a child writes to no page of ours
    children: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = children.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with status, contextlib.suppress(OSError):  # nobody waits for it any more
                        status.send(str(code).encode())
                    continue
                data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 4)
                if not data:
                    for pid, _ in children.values():
                        os.killpg(pid, signal.SIGKILL)
                    return
                status = socket.socket(fileno=fds[0])
                pid = _fork(json.loads(data), fds[1:])
                for fd in fds[1:]:
                    os.close(fd)
                status.send(str(pid).encode())
                pidfd = os.pidfd_open(pid)
                children[pidfd] = (pid, status)
                selector.register(pidfd, selectors.EVENT_READ)


def _fork(request: dict[str, Any], streams: Sequence[int]) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.chdir(request["cwd"])
        _become(request["arguments"], request["env"], ())
    return pid


# --- in a child -----------------------------------------------------------------------------------------------------


def _become(arguments: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]) -> NoReturn:
    """Be the process of ``python *arguments`` from here on: a clean slate, the program, and the end as Python ends."""
    code: object = 1
    try:
        _close_others(inherited)
        os.environ.clear()
        os.environ.update(environment)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # because Popen gives a child their defaults, and Python ignores them
        logging.disable(logging.NOTSET)
        gc.enable()
        sys.modules["numpy"].random.seed()
        # here, while there is one thread: torch makes its pool anew after a fork, and fails where two threads do so at once
        sys.modules["torch"].set_num_threads(1)
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        code = _outcome(arguments)
    finally:
        os._exit(_exit_code(code))


def _outcome(arguments: Sequence[str]) -> object:
    """Run the program; its argument of `sys.exit`, or None."""
    way, program, *rest = arguments
    sys.argv = [way, *rest]
    try:
        try:
            if way == "-m":
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            return None
        finally:
            _finish()
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise
    except BaseException:
        traceback.print_exc()
        return 1


def _finish() -> None:
    """Wait for threads as Python does, run what was registered for the end, and flush."""
    threading._shutdown()  # type: ignore[attr-defined] # ends the threads of executors first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    with contextlib.suppress(OSError):
        os.write(2, f"{code}\n".encode())
    return 1


def _close_others(inherited: Sequence[int]) -> None:
    """Close every file but the three streams and ``inherited``; in a preexec_fn that tells Popen that we have begun."""
    first = 3
    for fd in sorted(fd for fd in inherited if fd > 2):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 16)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen of a forked process: a module of ours is run in the child that Popen forks, instead of a new Python.

    So its parent, session, streams and inherited files are those which Popen gives any child.
    """

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        plain = [argument for argument in args if argument != "-P"] if isinstance(args, list | tuple) else []
        if plain[:2] == [sys.executable, "-m"] and plain[2] in FORKED:
            environment = options.get("env") or dict(os.environ)
            options["preexec_fn"] = functools.partial(_become, plain[1:], environment, options.get("pass_fds", ()))
        super().__init__(args, *rest, **options)


def main(control: int) -> None:
    import torch

    import lorakit

    torch.set_num_threads(1)
    ours = [module.name for module in pkgutil.walk_packages(lorakit.__path__, "lorakit.")]
    for name in (name for name in ours if not name.endswith("__main__")):
        importlib.import_module(name)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # an optional package, or another version of it
            importlib.import_module(name)
    serve(socket.socket(fileno=control))


if __name__ == "__main__":
    main(int(sys.argv[1]))
