"""A chat template is a stranger's program: what it may do, and what ends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgeserve.server.limits import Limits
from edgeserve.server.template_process import TemplateError, TemplateProcess

USER = {"role": "user", "content": "  hi  "}
LIMITS = replace(Limits(), template_render_s=0.3, max_rendered_chars=100_000)


@pytest.fixture
def processes() -> Iterator[list[TemplateProcess]]:
    started: list[TemplateProcess] = []
    yield started
    for process in started:
        process.close()


def render(
    processes: list[TemplateProcess], source: str, limits: Limits = LIMITS, **variables: object
) -> str:
    process = TemplateProcess(source, limits)
    processes.append(process)
    return process.render([USER], variables, add_generation_prompt=True)


def test_renders_as_templates_are_written_to_be(processes: list[TemplateProcess]) -> None:
    source = (
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m['role'] }}={{ m.content | trim }};{% generation %}g{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ {'b': 1, 'a': '<é>'} | tojson }}{% if tools %}tools{% endif %}{{ extra }}"
    )
    assert render(processes, source, extra="!") == 'user=hi;g{"b": 1, "a": "<é>"}!'


def test_the_clock_stands_still_for_a_day(processes: list[TemplateProcess]) -> None:
    assert render(processes, "{{ strftime_now('%H:%M:%S.%f') }}") == "00:00:00.000000"


def test_what_the_template_raises_is_told_in_its_words(processes: list[TemplateProcess]) -> None:
    with pytest.raises(TemplateError) as caught:
        render(processes, "{{ raise_exception('roles must alternate') }}")
    assert caught.value.status == 400
    assert "roles must alternate" in caught.value.message


HOSTILE = [
    pytest.param("{% for i in range(10**9) %}x{% endfor %}", id="long range"),
    pytest.param("{{ 'a' * 10**9 }}", id="repetition"),
    pytest.param("{{ [0] * 10**9 }}", id="list repetition"),
    pytest.param("{{ 10**10**9 }}", id="power"),
    pytest.param("{{ 'a' | center(10**10) }}", id="padding filter"),
    pytest.param("{{ 'a'.ljust(10**10) }}", id="padding method"),
    pytest.param("{{ '%9999999999d' | format(1) }}", id="format width"),
    pytest.param(
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        id="doubling",
    ),
    pytest.param(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", id="endless loop"
    ),
    pytest.param(
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        id="endless recursion",
    ),
    pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", id="deep recursion"),
    pytest.param("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", id="long output"),
    pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="attribute walk"),
    pytest.param("{{ cycler.__init__.__globals__.os.environ }}", id="globals walk"),
    pytest.param("{% set x = messages.append(1) %}", id="mutation"),
    pytest.param("{% if 1 %}" * 5000 + "{% endif %}" * 5000, id="deep nesting"),
    pytest.param("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", id="deep parentheses"),
    pytest.param("{% if %}", id="syntax error"),
    pytest.param("a" * (10 << 20), id="10 MB"),
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_a_refused_request(processes: list[TemplateProcess], source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(processes, source)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000


def test_a_killed_process_is_replaced_for_the_next_request(processes: list[TemplateProcess]) -> None:
    source = (
        "{% if loop_for_ever %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}done"
    )
    process = TemplateProcess(source, LIMITS)
    processes.append(process)
    with pytest.raises(TemplateError, match=r"longer than 0\.3 s"):
        process.render([USER], {"loop_for_ever": True}, add_generation_prompt=True)
    assert process.render([USER], {}, add_generation_prompt=True) == "done"


def test_the_rendering_process_has_no_secrets(
    processes: list[TemplateProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESERVE_API_KEY", "sk-secret")
    process = TemplateProcess("x", LIMITS)
    processes.append(process)
    process.render([USER], {}, add_generation_prompt=True)
    import psutil

    child = next(c for c in psutil.Process().children() if "template_worker.py" in " ".join(c.cmdline()))
    assert "sk-secret" not in json.dumps(child.environ())
