"""Only the thread that decodes keeps OpenMP's threads: with more of them than cores, all wait asleep (decision 0082)."""

import os
import subprocess
import sys

import pytest

from lorakit.ops.openmp import limit_spinning

NATIVE_THREADS = """
import os, sys, threading, torch, lorakit
from lorakit import LorakitError
from lorakit.serving.adapter_pool import AdapterPool
from lorakit.serving.engine import ServingEngine

def num_native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

work = lambda: torch.ones(1000, 1000).sigmoid_()  # large enough for all cores
work()
before = num_native()
model = lorakit.load("builtin:tiny", dtype="float32")
loaded = num_native()
engine = ServingEngine(model)
answer = engine.submit([5] * 40).ids()
decoding = num_native()
pool = AdapterPool(model)


def load():
    work()
    pool.load("json", sys.argv[1])
    work()
    try:
        pool.load("json", sys.argv[1])  # the name is taken
    except LorakitError:
        done.set()
    ends.wait()

loading = threading.Thread(target=load)
done, ends = threading.Event(), threading.Event()
loading.start()
done.wait(60)
print(before, loaded, decoding, num_native(), pool.names)
ends.set()
os._exit(0)
"""


LORAKIT = (sys.executable, "-c", "import sys; from lorakit.cli import main; sys.exit(main())")


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP there")
@pytest.mark.parametrize(("given", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_a_servers_threads_do_not_spin_for_long(given: dict[str, str], expected: str) -> None:
    others = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = others | {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    serve = [*LORAKIT, "serve", "builtin:tiny", "--adapter", "a=missing", "--port", "0"]

    done = subprocess.run(serve, capture_output=True, text=True, env=environment, check=False)

    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
    environment = {"OMP_WAIT_POLICY": "active"}
    limit_spinning(environment)
    assert environment == {"OMP_WAIT_POLICY": "active"}


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_loading_only_the_engines_thread_keeps_openmps_threads() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    script = [sys.executable, "-c", NATIVE_THREADS, "adapters/json"]

    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=True)

    assert done.stdout.split() == ["1", "0", "1", "1", "('json',)"]
