"""Chat templates that compute huge values are refused before they do, and others are rendered as without limits."""

import itertools
import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer

from lorakit.data import template_limits
from lorakit.data.chat_template import render_template, template_variables
from lorakit.patch.prompting import NAMED_TEMPLATES, read_chat_template

TINY = Path(__file__).parents[2] / "lorakit" / "assets" / "tiny"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes "}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def doubled(expression: str, start: str = "'aaaaaaaaaa'") -> str:
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(99) %}}{{% set n.x = {expression} %}}{{% endfor %}}"


LONG = "{% set x = 'a' * 2 ** 22 %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 10 ** (10 ** 9) }}", "{{ (9 ** (9 ** 8)) % 7 }}", "{{ 'a' * 10 ** 10 }}", "{{ 10 ** 10 * [0] }}",
        "{{ '%9999999999d' % 1 }}", "{{ '%*d' % (10 ** 10, 1) }}", "{{ (-10) ** 9999 }}", "{{ 10 ** 1000 * 10 ** 1000 }}",
        doubled("n.x ~ n.x"), doubled("n.x + n.x"), doubled("n.x * 2"), doubled("n.x|tojson", "'\"'"),
        "{{ 'a'.ljust(10 ** 9) }}", "{{ ('a'|attr('ljust'))(10 ** 9) }}", "{{ ['a']|map('center', 10 ** 9)|list }}",
        "{{ '{:999999999}'.format(1) }}", "{{ '{:{}}'.format(1, 10 ** 9) }}", "{{ '%999999999d'|format(1) }}",
        "{{ '\t\t'.expandtabs(10 ** 9) }}", "{{ [1]|slice(10 ** 9)|list }}", "{{ [1]|batch(10 ** 9, 0)|list }}",
        "{{ 1|round(-20000000) }}", "{{ ('f' * 2000001)|int(base=16) }}", "{{ [[1]]|sum(start=[]) }}",
        "{{ [1]|tojson(indent=2000000000) }}", "{{ 'a'|indent(2000000000) }}", "{{ '%(a)2000000000d'|format(a=1) }}",
        "{{ '%(a)2000000000d' % {'a': 1} }}", "{{ '{0[}]:2000000000}'.format({'}': 1}) }}",
        LONG + "{{ 'a b'|wordwrap(1, wrapstring=x * 4) }}", LONG + "{{ [1, 2, 3, 4, 5]|tojson(separators=(x, ':')) }}",
        LONG + "{{ ([x] * 150)|string }}", LONG + "{% set n = namespace(l=[]) %}{% for i in range(99) %}"
        "{% set n.l = n.l + [x ~ i] %}{% endfor %}",
        LONG + "{{ x.replace('a', x) }}", LONG + "{{ x|replace('a', x) }}", LONG + "{{ x.translate({97: x}) }}",
        LONG + "{{ x.join(range(99)|map('string')) }}", LONG + "{{ range(99)|join(x) }}",
        LONG + "{{ [{'a': x}]|batch(99, {'a': x})|first|join(attribute='a') }}", "{{ ('\n' * 2 ** 20)|indent(99999) }}",
        "{{ ('%(a)s' * 999) % {'a': 'x' * 999999} }}", "{{ ('{0}' * 999).format('x' * 999999) }}",
        "{{ ('%(a)s' * 999)|format(a='x' * 999999) }}", "{{ strftime_now('%255d' * 2 ** 20) }}",
        "{% set n = namespace(x=[1] * 3000) %}{% for i in range(200) %}{% set n.x = [n.x] %}{% endfor %}"
        "{{ n.x|tojson(indent=4000) }}",
        *(f"{{{{ ('<!--' * 2 ** 13)|{name} }}}}" for name in ("pprint", "striptags", "urlize", "wordwrap")),
        pytest.param(doubled("n.x + n.x", "[1]"), marks=pytest.mark.matrix),
        pytest.param(doubled("n.x * n.x", "9"), marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_a_huge_value_is_refused_before_it_is_computed(tokenizer: Any, template: str) -> None:
    template_variables(template)  # computes no constants either
    with pytest.raises(SecurityError, match="the chat template (computes a value|writes a number) of"):
        render_template(tokenizer, MESSAGES, template=template)


@pytest.mark.parametrize(
    "nested",
    [
        "[n.x, n.x]",
        "(n.x, n.x)",
        "{1: n.x, 2: n.x}",
        "dict(a=n.x, b=n.x)",
        "[n.x] * 2",
        "namespace(a=n.x, b=n.x)",
        "{1: n.x, 2: n.x}.values()",
        "[{1: n.x, 2: n.x}.items()]",
    ],
)
@pytest.mark.parametrize("use", ["{{ n.x }}", "{{ n.x|tojson }}", "{{ n.x == [n.x] }}"])
def test_a_list_of_one_list_many_times_is_refused(tokenizer: Any, nested: str, use: str) -> None:
    """Whose text has two to the power of its depth entries."""
    with pytest.raises(SecurityError, match="the chat template computes a value of"):
        render_template(tokenizer, MESSAGES, template=doubled(nested) + use)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + doubled("f(n.x)"),
        LONG + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    ],
)
def test_a_long_text_is_not_written_piece_by_piece(tokenizer: Any, template: str) -> None:
    with pytest.raises(SecurityError, match="the chat template computes a value of"):
        render_template(tokenizer, MESSAGES, template=template)


def test_lists_and_methods_of_common_templates_are_computed(tokenizer: Any) -> None:
    template = (
        "{% for a, b in [('x', 1), ('y', 2)] %}{{ a ~ b }}{% endfor %}{{ '{}-{{}}'.format(2 ** 31) }}{{ 'a'.center(3) }}"
        "{{ ['p', 'q']|map('upper')|join(', ') }}{{ ', '.join(messages|map(attribute='role')) }}{{ 'a\nb'|indent(2) }}"
        "{% set c = [messages[0]] + messages[1:] %}{{ c|length }}{{ '%d'|format(7) }}{{ [1, 2, 3]|batch(2)|list }}"
    )
    template += (
        "{{ none_such|replace('a', 'b') }}{{ 5|replace('5', '7') }}{{ [1, 2]|join(0) }}{{ 5|format }}{{ 2.345|round(1) }}"
        "{{ '{:,}'.format(1234567) }}{{ {'a': [1]}|tojson(indent=2) }}{{ [1, 2]|sum }}{{ 'a b c'|wordwrap(3) }}"
    )
    text = render_template(tokenizer, MESSAGES, template=template)
    assert text == "x1y22147483648-{} a P, Quser, assistanta\n  b27[[1, 2], [3]]" + (
        '710252.31,234,567{\n  "a": [\n    1\n  ]\n}3a b\nc'
    )


@pytest.mark.parametrize("template", ["{{ 'a'.encode().ljust(10 ** 9) }}", "{{ (1).to_bytes(10 ** 9, 'big') }}"])
def test_methods_of_bytes_and_numbers_are_refused(tokenizer: Any, template: str) -> None:
    with pytest.raises(SecurityError, match="calls a method of bytes or of a number"):
        render_template(tokenizer, MESSAGES, template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        doubled("n.x", "'a' * 2 ** 20 ") + "{% for i in range(99999) %}{% set n.x = n.x|upper %}{% endfor %}",
        "{% set n = namespace(x=range(99999)) %}{% for i in range(400) %}"
        "{% set n.x = n.x|map(attribute='real') %}{% endfor %}{{ n.x|list|length }}",
        "{{ range(99999)|map(attribute='real.' * 2 ** 20 ~ 'real')|list|length }}",
        "{{ range(99999)|sort(attribute='real,' * 2 ** 10 ~ 'real')|length }}",
        "{{ range(99999)|select('in', range(99999, 199998)|list)|list }}",
        LONG + "{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
        LONG + "{{ x[1:] is eq(x[:-1]) }}" * 999,
    ],
)  # fmt: skip
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rendering_without_end_is_ended(
    tokenizer: Any, template: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any thread, which then computes on as if nothing had been."""

    def rendered() -> str:
        with monkeypatch.context() as fast:
            fast.setattr(template_limits, "MAX_SECONDS", 0.1)
            with pytest.raises(SecurityError, match="the chat template computes for more than"):
                render_template(tokenizer, MESSAGES, template=template)
        return render_template(tokenizer, MESSAGES)

    with ThreadPoolExecutor(1) as pool:
        assert (pool.submit(rendered).result() if elsewhere else rendered()) == plain(
            tokenizer.chat_template, tokenizer
        )


def test_a_forked_process_ends_renderings_too(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    render_template(tokenizer, MESSAGES)
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        with pytest.raises(SecurityError, match="the chat template computes for more than"):
            pool.apply(render_template, (tokenizer, MESSAGES), {"template": endless})


def test_a_rendering_that_waits_is_not_ended(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a process that was stopped, or for others on the same cores: an hour passes at each look at the clock."""
    hours = SimpleNamespace(perf_counter=itertools.count(0, 3600).__next__, thread_time=time.thread_time)
    monkeypatch.setattr(template_limits, "time", hours)
    assert render_template(tokenizer, MESSAGES) == plain(tokenizer.chat_template, tokenizer)
    assert hours.perf_counter() > 3600 * 10


@pytest.mark.parametrize("name", [*NAMED_TEMPLATES, None])
def test_limits_change_no_rendering(tokenizer: Any, name: str | None) -> None:
    template = tokenizer.chat_template if name is None else read_chat_template(name)
    assert render_template(tokenizer, MESSAGES, template=template) == plain(template, tokenizer)


def test_what_templates_use_is_rendered_as_without_limits(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.content|replace('h', 'j') ~ 1 ~ none }}{{ '%s-%5d %%9' % (m.role, 8000000000) }}"
        "{{ 8000000000 * 3 }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ 7 % 4 }}{{ (1,) + (2,) }}{{ 2.0 ** 3 }}"
        "{% if m.role in ['user', 'x'] %}{{ m.role.split('s')[0] + '!' }}{% endif %}{% endfor %}{{ absent ~ 1 }}"
        "{% set ns = namespace(l=[]) %}{% for m in messages if m.content %}{% set ns.l = ns.l + [m.role] %}{% endfor %}"
        "{{ ns.l }}{{ true * 3 }}"
    )
    assert render_template(tokenizer, MESSAGES, template=template) == plain(template, tokenizer)


def plain(template: str, tokenizer: Any) -> str:
    """Render in jinja's own sandbox, as transformers does without limits."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return environment.from_string(template).render(messages=MESSAGES, add_generation_prompt=False, **tokens)
