"""A call that may never return, with a limit: a store whose host was cut off never answers."""

import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistError

T = TypeVar("T")


def answered(call: Callable[[], T], seconds: float) -> T:
    """What ``call`` returns or raises. It may be left behind: a store whose host was cut off never answers.

    Raises:
        DistError: it did not return in time.
    """
    done: list[tuple[T | None, Exception | None]] = []

    def work() -> None:
        try:
            done.append((call(), None))
        except Exception as problem:
            done.append((None, problem))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise DistError(f"no answer for {seconds:g} s")
    result, problem = done[0]
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]
