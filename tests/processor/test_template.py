"""The sandbox around chat templates, and what published templates rely on."""

from __future__ import annotations

import re

import pytest

from benchmarks import checkpoints
from saccade.errors import ConfigError, RequestError
from saccade.processor.template import render

pytestmark = pytest.mark.transformers

HELLO = [{"role": "user", "content": "hello"}]


def test_a_conversation_is_rendered() -> None:
    text = render(checkpoints.QWEN_TEMPLATE, HELLO)
    assert text.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_the_generation_prompt_can_be_left_out() -> None:
    assert render(checkpoints.QWEN_TEMPLATE, HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")


def test_blocks_leave_no_blank_lines() -> None:
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}", HELLO)
        == "hello\n"
    )


def test_loops_can_be_left_and_continued() -> None:
    leave = "{% if i == 3 %}{% break %}{% endif %}"
    go_on = "{% if i == 1 %}{% continue %}{% endif %}"
    assert render("{% for i in range(9) %}" + leave + go_on + "{{ i }}{% endfor %}", HELLO) == "02"


def test_generation_blocks_pass_their_body_through() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", HELLO) == "abhelloc"


def test_json_is_not_escaped_for_html() -> None:
    tools = [{"name": "<f> & 'é'"}]
    assert render("{{ tools | tojson }}", HELLO, tools=tools) == '[{"name": "<f> & \'é\'"}]'


def test_json_can_be_indented() -> None:
    assert render("{{ tools | tojson(indent=1) }}", HELLO, tools=[{}]) == "[\n {}\n]"


def test_the_date_can_be_asked_for() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}", HELLO))


def test_extra_arguments_reach_the_template() -> None:
    assert render("{{ bos_token }}{{ mode }}", HELLO, bos_token="<s>", mode="x") == "<s>x"


def test_the_templates_own_refusal_is_the_clients_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", HELLO)
    assert caught.value.param == "messages"


def test_messages_the_template_cannot_read_are_the_clients_error() -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        render("{{ messages[0].content + 1 }}", HELLO)


def test_what_a_template_cannot_do_is_told_by_its_line_and_not_by_jinja() -> None:
    with pytest.raises(RequestError, match=r"refuses these messages: line 3 of it cannot work with them$"):
        render("a\n{% if true %}\n{{ messages[0].nothing.more }}\n{% endif %}", HELLO)
    macro = "{% macro f() %}\n{{ 1 / 0 }}\n{% endmacro %}\n\n{{ f() }}"
    with pytest.raises(RequestError, match=r"line 2 of it cannot work"):
        render(macro, HELLO)


def test_a_template_writes_no_more_than_it_may() -> None:
    template = "{% for i in range(100) %}{{ messages[0].content }}{% endfor %}"
    assert len(render(template, HELLO, 500)) == 500
    with pytest.raises(RequestError, match="writes more than 499 characters") as caught:
        render(template, HELLO, 499)
    assert caught.value.code == "context_length_exceeded"


def test_macros_that_call_each_other_without_end_are_the_templates_refusal() -> None:
    with pytest.raises(RequestError, match="call each other too deeply"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", HELLO)


def test_arguments_may_be_called_like_our_own() -> None:
    assert render("{{ max_chars }}{{ kwargs }}", HELLO, max_chars=1, kwargs=2) == "12"


@pytest.mark.parametrize(
    "attack", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__subclasses__() }}"]
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    with pytest.raises(RequestError):
        render(attack, HELLO)


def test_a_missing_template_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        render(None, HELLO)


def test_a_broken_template_names_the_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        render("\n{% if %}", HELLO)
