"""Silence the training libraries while lorakit starts and runs them, because lorakit checks the settings itself."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress log records up to WARNING, standard output and Python warnings inside the block."""
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
    """Ignore torch.distributed's deprecation warnings: DeepSpeed calls the older names, not the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
        yield
