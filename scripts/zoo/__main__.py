"""Try architectures, each in a process of its own; print what came of each as a line of JSON. All: write the page."""

import argparse
import json
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from scripts.zoo.page import PAGE, page
from scripts.zoo.trial import TOLERANCE, Outcome, try_architecture

SECONDS: Final = 300  # after which an architecture counts as one that does not end


def outcomes(names: Sequence[str], num_processes: int) -> Iterator[Outcome]:
    """Yield what came of each architecture, in any order."""
    import transformers

    from lorakit.base.find import find_base

    tokenizer = transformers.AutoTokenizer.from_pretrained(find_base("builtin:tiny"))
    context = multiprocessing.get_context("fork")  # so that libraries are imported once
    with context.Pool(num_processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_try, [(name, tokenizer) for name in names])


def _try(task: tuple[str, Any]) -> Outcome:
    import torch

    torch.set_num_threads(1)
    name, tokenizer = task
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return try_architecture(name, tokenizer, folder)
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all that transformers has)")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    tables = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = options.names or [*dict.fromkeys(name for table in tables for name in table)]
    done = []
    for outcome in outcomes(names, options.processes):
        done.append(asdict(outcome))
        print(json.dumps(done[-1]), flush=True)
    if not options.names:
        PAGE.write_text(page(done, transformers.__version__, TOLERANCE), encoding="utf-8")


if __name__ == "__main__":
    main()
