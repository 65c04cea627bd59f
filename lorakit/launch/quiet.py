"""Without what the engines print while they start: what matters of it is looked up and checked."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No notes, progress or warnings of libraries inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """Engines call torch's functions by their older names; a user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
        yield
