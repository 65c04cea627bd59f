"""httpx's calls without its limit of 5 seconds: the time limit of a test decides, not a busy machine."""

from functools import partial
from typing import Final

import httpx

get: Final = partial(httpx.get, timeout=None)
post: Final = partial(httpx.post, timeout=None)
request: Final = partial(httpx.request, timeout=None)
stream: Final = partial(httpx.stream, timeout=None)
Client: Final = partial(httpx.Client, timeout=None)
