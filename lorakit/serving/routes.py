"""What a route is, and the OpenAPI document of a table of routes.

The table itself is in app.py. Keys, metrics, the log and the document are derived from it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from lorakit.serving.requests import Body
from lorakit.version import VERSION

DEFINITIONS: Final = "#/components/schemas/{model}"


@final
@dataclass(frozen=True)
class ApiRoute:
    """One route.

    handler: takes the request, and the body if there is one. body: its model; None: without a body. key: which one it
    needs. is_counted: it has metrics. is_quiet: its successes are not logged, because it is polled. is_documented:
    False for the files of the page.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[..., Any]
    summary: str
    body: type[Body] | None = None
    key: Literal["none", "api", "admin"] = "api"
    is_counted: bool = False
    is_quiet: bool = False
    is_documented: bool = True


def openapi_document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.is_documented:
            path = route.path.replace("{name:path}", "{name}")
            paths[path] = {route.method.lower(): _operation(route, schemas)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorakit serve", "version": VERSION},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a route's operation, and add the models that its body refers to."""
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "done"},
            "4XX": {"description": "refused; the message names the field", "content": {"application/json": {}}},
            "5XX": {"description": "failed"},
        },
    }
    if "{name" in route.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if route.body is not None:
        schema = route.body.model_json_schema(ref_template=DEFINITIONS)
        schemas.update(schema.pop("$defs", {}))
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
