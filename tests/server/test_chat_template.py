"""What a template can do is found out by trying, and conversations are bent to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgeserve.server.chat_template import CHATML, ChatTemplate, fold_system

LOOP = "{% for m in messages %}{BODY}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
NO_SYSTEM = LOOP.replace(
    "{BODY}",
    "{% if m.role == 'system' %}{{ raise_exception('No system role') }}{% endif %}{{ m.content }}|",
)
IGNORES_SYSTEM = LOOP.replace("{BODY}", "{% if m.role != 'system' %}{{ m.content }}|{% endif %}")
PARTS_ONLY = LOOP.replace("{BODY}", "{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}|")
EITHER = LOOP.replace(
    "{BODY}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)
TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %})"
    "{% endfor %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ reasoning_effort }}"
)


@pytest.fixture
def probed() -> Iterator[Callable[[str], ChatTemplate]]:
    made: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        made.append(ChatTemplate(source))
        made[-1].probe()
        return made[-1]

    yield make
    for template in made:
        template.close()


Probe = Callable[[str], ChatTemplate]


def caps(template: ChatTemplate) -> dict[str, bool]:
    return {name: getattr(template.caps, name) for name in template.caps.__dataclass_fields__}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, {"supports_system_role": True, "supports_string_content": True, "supports_tools": False}),
        (NO_SYSTEM, {"supports_system_role": False, "supports_string_content": True}),
        (IGNORES_SYSTEM, {"supports_system_role": False}),
        (
            PARTS_ONLY,
            {"supports_string_content": False, "supports_typed_content": True, "supports_system_role": True},
        ),
        (EITHER, {"supports_string_content": True, "supports_typed_content": True}),
        (
            TOOLS,
            {
                "supports_tools": True,
                "supports_tool_calls": True,
                "supports_object_arguments": True,
                "supports_parallel_tool_calls": True,
            },
        ),
        (
            THINKING,
            {
                "supports_enable_thinking": True,
                "supports_preserve_reasoning": True,
                "supports_reasoning_effort": True,
            },
        ),
    ],
)
def test_caps(probed: Probe, source: str, expected: dict[str, bool]) -> None:
    found = caps(probed(source))
    assert {name: found[name] for name in expected} == expected


def test_system_text_goes_into_the_first_user_turn_where_it_must(probed: Probe) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for source in (NO_SYSTEM, IGNORES_SYSTEM):
        assert probed(source).render_for_answer(messages, {}).prompt == "Be brief.\n\nHi|A:"


def test_content_becomes_parts_where_it_must(probed: Probe) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert probed(PARTS_ONLY).render_for_answer(messages, {}).prompt == "user:Hi|A:"


@pytest.mark.parametrize(
    ("roles", "folded"),
    [
        ("su", [("user", "0\n\n1")]),
        ("ssu", [("user", "0\n\n1\n\n2")]),
        ("s", [("user", "0")]),
        ("usu", [("user", "0"), ("user", "1\n\n2")]),
        ("uas", [("user", "0"), ("assistant", "1"), ("user", "2")]),
        ("u", [("user", "0")]),
    ],
)
def test_fold_system(roles: str, folded: list[tuple[str, str]]) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages: list[dict[str, Any]] = [
        {"role": names[role], "content": str(index)} for index, role in enumerate(roles)
    ]
    assert [(message["role"], message["content"]) for message in fold_system(messages)] == folded
