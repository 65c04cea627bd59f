"""A worker of an elastic run that records what it does, and fails where a plan says: ``-m ... FOLDER train RECIPE``.

FOLDER/plan.json: number of a worker -> [step counted from 0 or null for any, point, what happens]. FOLDER/worker-N.jsonl gets a line
for each step whose gradients it has summed with the others.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorakit.cli import main
from lorakit.launch.environment import WORKER_VARIABLE
from lorakit.parallel import elastic
from lorakit.parallel.elastic import ElasticEngine


def become_faulty(folder: Path) -> None:
    """Record this process's steps, and do to it what the plan says."""
    number = os.environ.get(WORKER_VARIABLE, os.environ["RANK"])
    planned = json.loads((folder / "plan.json").read_text()).get(number, [])
    state: dict[str, Any] = {"step": 0, "rows": []}
    step, share, sum_gradients = ElasticEngine.step, ElasticEngine.share, elastic.sum_gradients

    def reach(point: str) -> None:
        for fault in planned:
            if fault[0] in (state["step"], None) and fault[1] == point:
                planned.remove(fault)
                FAULTS[fault[2]]()

    def recorded_step(self: ElasticEngine, index: int, micro_batches: Any) -> Any:
        state.update(step=index, rows=[row for batch in micro_batches for row in batch.row_indices], engine=self)
        reach("begun")
        report = step(self, index, micro_batches)
        reach("counted")
        return report

    def recorded_sum(*arguments: Any) -> None:
        reach("before the sum")
        sum_gradients(*arguments)
        engine = state["engine"]
        line = {"step": state["step"], "rows": state["rows"], "size": engine.group.size, "group": engine._formed}
        with open(folder / f"worker-{number}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        reach("after the sum")

    def recorded_share(self: ElasticEngine, source: int, text: str) -> str:
        state["step"] = json.loads(text)["progress"]["step"]
        reach("shared")
        return share(self, source, text)

    ElasticEngine.step, ElasticEngine.share = recorded_step, recorded_share  # type: ignore[method-assign]
    elastic.sum_gradients = recorded_sum


def lose_connection() -> None:
    raise RuntimeError("gloo/transport: planned")


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lose": lose_connection,
    "wait": lambda: time.sleep(5),
}

if __name__ == "__main__":
    become_faulty(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
