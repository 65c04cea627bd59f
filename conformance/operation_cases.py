"""Keys, health, metrics, request ids, clients that leave, and bodies that are none."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conformance.case import LLAMA, VLLM, Case, case
from conformance.server import ADMIN, API_KEY, BASE, CHAT, TEXT, Server
from lorakit.version import VERSION

CASES: list[Case] = []
BASIC = "serve/instrumentator/test_basic.py"
METRICS = "serve/instrumentator/test_metrics.py"
SECURITY = "test_security.py"
KEYS = "serve/middleware/test_authentication_middleware.py"
FAMILIES = {  # those of vLLM's that a dashboard of a server of adapters shows
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:request_success", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
}  # fmt: skip


def metric(server: Server, name: str) -> float:
    """Return the sum of a metric's samples."""
    text = server.http.get("/metrics").text
    return sum(
        one.value for family in text_string_to_metric_families(text) for one in family.samples if one.name == name
    )


def until_idle(server: Server) -> None:
    until = time.monotonic() + 20
    while metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting") > 0:
        assert time.monotonic() < until, "requests of clients that left go on"
        time.sleep(0.05)


@case(CASES, VLLM, f"{BASIC}: test_show_version")
def the_version_is_shown(server: Server) -> None:
    assert server.http.get("/version").json() == {"version": VERSION}


@case(CASES, LLAMA, f"{SECURITY}: test_access_public_endpoint", note="`/v1/models` needs a key")
def health_needs_no_key(server: Server) -> None:
    assert httpx.get(f"{server.address}/health").status_code == 200


@case(CASES, LLAMA, f"{SECURITY}: test_access_static_assets_without_api_key")
def the_page_needs_no_key(server: Server) -> None:
    reply = httpx.get(f"{server.address}/")
    assert (reply.status_code, "<!doctype html>" in reply.text.lower()) == (200, True)


@case(CASES, LLAMA, f"{SECURITY}: test_incorrect_api_key")
def a_wrong_key_is_an_authentication_error(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer invalid"}):
        reply = httpx.post(f"{server.address}{TEXT}", json=server.body(TEXT), headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


@case(CASES, LLAMA, f"{SECURITY}: test_correct_api_key")
def the_right_key_is_answered(server: Server) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    assert httpx.post(f"{server.address}{TEXT}", json=server.body(TEXT), headers=headers).status_code == 200


@case(CASES, VLLM, f"{KEYS}: test_auto_discovered_protected_routes_require_auth")
def every_other_route_needs_a_key(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        (method,) = operations
        reply = httpx.request(method, f"{server.address}{path.replace('{name}', BASE)}")
        assert reply.status_code == (200 if path in ("/health", "/version") else 401), path


@case(CASES, VLLM, f"{KEYS}: test_bare_options_on_a_guarded_mount_needs_a_token")
def another_method_needs_a_key_too(server: Server) -> None:
    assert httpx.options(f"{server.address}/metrics").status_code == 401


@case(CASES, VLLM, "serve/middleware/test_x_request_id.py: test_response_has_one_request_id")
def a_reply_has_one_request_id(server: Server) -> None:
    given = server.http.get("/v1/models", headers={"X-Request-Id": "caller"})
    assert given.headers.get_list("x-request-id") == ["caller"]
    (made,) = server.http.get("/v1/models").headers.get_list("x-request-id")
    assert (len(made), int(made, 16) > 0) == (32, True)


@case(CASES, VLLM, f"{METRICS}: test_metrics_counts")
def tokens_and_requests_are_counted(server: Server) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    before = [metric(server, name) for name in names]
    for _ in range(3):
        number = server.ask(TEXT, min_tokens=8)["usage"]["prompt_tokens"]
    time.sleep(0.2)  # a request is counted a moment after its last byte
    assert [metric(server, name) - was for name, was in zip(names, before, strict=True)] == [3 * number, 24, 3]


@case(CASES, VLLM, f"{METRICS}: test_metrics_exist", note=f"{len(FAMILIES)} families of vLLM's")
def metrics_have_vllms_names(server: Server) -> None:
    families = {family.name for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    assert families >= FAMILIES


@case(CASES, VLLM, f"{METRICS}: test_abort_metrics_reset")
def nothing_runs_when_clients_have_left(server: Server) -> None:
    body = server.body(TEXT) | {"max_tokens": 900, "min_tokens": 900, "n": 3, "stream": True}
    with server.http.stream("POST", TEXT, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert metric(server, "vllm:num_requests_running") > 0
    until_idle(server)


@case(CASES, VLLM, f"{BASIC}: test_request_cancellation")
def the_server_answers_at_once_when_many_clients_gave_up(server: Server) -> None:
    def give_up(_: int) -> None:
        body = server.body(CHAT) | {"max_tokens": 900, "min_tokens": 900}
        with pytest.raises(httpx.TimeoutException):
            server.http.post(CHAT, json=body, timeout=0.5)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(give_up, range(20)))
    until_idle(server)
    server.is_well()


@case(CASES, LLAMA, "test_completion.py: test_cancel_request")
def a_request_that_timed_out_frees_its_row(server: Server) -> None:
    with pytest.raises(httpx.TimeoutException):
        server.http.post(TEXT, json=server.body(TEXT) | {"max_tokens": 900, "min_tokens": 900}, timeout=0.1)
    until_idle(server)


@case(
    CASES,
    VLLM,
    "openai/chat_completion/test_non_object_body_validation.py: test_chat_completion_request_rejects_non_object_body",
)
def a_body_that_is_no_object_is_refused(server: Server) -> None:
    for content in (b"this is not valid json{{{", b'["not", "an", "object"]', b"42", b"null", b"", b"\xff"):
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            assert server.http.post(path, content=content).status_code == 400, (path, content)


@case(CASES, VLLM, f"{BASIC}: test_request_wrong_content_type", note="answered: `curl -d` sends this type unless told")
def a_body_is_json_whatever_its_type_says(server: Server) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.http.post(TEXT, json=server.body(TEXT), headers=headers).status_code == 200


@case(CASES, VLLM, "serve/exception_handling/test_validation_exception_handler.py: TestValidationErrorParamFallback")
def an_error_names_its_field_as_param(server: Server) -> None:
    for field, value in (("messages", 1), ("n", "two"), ("stop", 5), ("stream", "yes"), ("logit_bias", [])):
        error = server.http.post(CHAT, json=server.body(CHAT) | {field: value}).json()["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error")


@case(CASES, VLLM, "serve/exception_handling/test_validation_exception_handler.py: TestValidationErrorBodyIsBounded")
def an_error_does_not_repeat_what_was_sent(server: Server) -> None:
    long = "A" * 100_000
    bodies: list[dict[str, Any]] = [
        {"max_tokens": long}, {"model": long}, {long: 1}, {"response_format": {"type": long}}, {"stop": [{}] * 9999},
    ]  # fmt: skip
    for fields in bodies:
        reply = server.http.post(TEXT, json=server.body(TEXT) | fields)
        assert reply.status_code in (400, 404)
        assert len(reply.json()["error"]["message"]) < 4000


@case(CASES, VLLM, "serve/lora/test_serving_models.py: test_load_lora_adapter_missing_fields")
def loading_without_a_name_or_a_path_is_refused(server: Server) -> None:
    for body in ({"lora_name": "", "lora_path": ""}, {"lora_name": "x"}, {"lora_path": "json"}, {}):
        assert server.http.post("/v1/load_lora_adapter", json=body, headers=dict(ADMIN)).status_code == 400
