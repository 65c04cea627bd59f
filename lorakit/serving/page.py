"""Serve the page at `/`: ask the base and its adapters side by side. Plain HTML and JavaScript from this package."""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER: Final = Path(__file__).parent.parent / "assets" / "page"
FILES: Final = {
    "/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript"),
}  # fmt: skip
"""path -> file and its type"""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # a new version of the package has another page under the same address
}


async def _file(request: Request) -> Response:
    name, media_type = FILES[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=media_type, headers=HEADERS)


ROUTES: Final = [Route(path, _file) for path in FILES]
