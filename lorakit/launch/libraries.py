"""Make training libraries quiet, and limit the kernels that torch's matrix library on CPUs stores. Imports no torch.

The limits are set before the library reads them. oneDNN compiles a kernel, in 16 bits of 258 KB, for every new shape of
a product, and rows of other lengths are new shapes. Unlimited, oneDNN and torch's layer above it store 1,024 kernels
each, between freed activations that cannot then be reused. A kernel serves the layers of one micro-batch, and seldom a
later one. Measured in bfloat16 with packed rows of 8 to 120 words, 8 in a micro-batch: 1,540 MB resident without these
limits, 582 with them, in no more time. In float32 oneDNN computes the products with frozen weights, where it is faster
(lorakit/ops/products.py).
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, MutableMapping
from typing import Final

NUM_KERNELS: Final = 128
"""Kernels that oneDNN stores. With 64, micro-batches of 32 packed rows compile the same kernels again and again."""
FLOAT32_KERNELS: Final = 32
"""kernels for float32: with 8, a micro-batch compiled most of its 14 again. Rows of 16 to 512 words took 966 MB with
32, and 1,116 with 128"""
ONEDNN_KERNELS: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
LIMITS: Final = {
    ONEDNN_KERNELS: NUM_KERNELS,
    "LRU_CACHE_CAPACITY": 4,  # torch's layer: copies of oneDNN's kernels, which save no time. 0 would end the process
}
"""environment variable -> kernels; each is read once, at the first product"""


def limit_kernel_caches(dtype: str = "auto", environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit the caches of this process and its children, unless variables do. dtype: as a recipe has it."""
    limits = LIMITS | ({ONEDNN_KERNELS: FLOAT32_KERNELS} if dtype == "float32" else {})
    if older_name := environment.get("DNNL_PRIMITIVE_CACHE_CAPACITY"):
        environment.setdefault(ONEDNN_KERNELS, older_name)
    for name, limit in limits.items():
        environment.setdefault(name, str(limit))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress log records up to WARNING, standard output and Python warnings: lorakit checks settings itself."""
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
