"""The chat format: what the template writes, written again in Python for speed. A test compares the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

END_OF_TEXT = "<|endoftext|>"
START, END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIALS = (END_OF_TEXT, START, END, VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO)

# A tool is shown as the call of it, with types in the place of values: short, and its names are spelled as in a call.
TEMPLATE = (
    "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
    "{% if part['type'] == 'image' or part['type'] == 'image_url' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% set rest = messages %}"
    "{% if tools %}<|im_start|>system\n"
    "{% if messages and messages[0]['role'] == 'system' %}{{ written(messages[0]['content']) }}\n"
    "{% set rest = messages[1:] %}{% endif %}"
    "Tools:{% for tool in tools %}{% set function = tool['function'] or tool %}{{ '\\n' }}"
    "{% if function['description'] %}{{ function['description'] }} {% endif %}"
    '{"name": "{{ function[\'name\'] }}", "arguments": {{ "{" }}'
    "{% for key, value in ((function['parameters'] or {})['properties'] or {}).items() %}"
    "\"{{ key }}\": \"{% if value['type'] is string %}{{ value['type'] }}{% else %}any{% endif %}\""
    "{% if not loop.last %}, {% endif %}{% endfor %}{{ '}}' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in rest %}<|im_start|>{{ message['role'] }}\n{{ written(message['content']) }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    '<tool_call>\n{"name": "{{ function[\'name\'] }}", "arguments": {{ function[\'arguments\'] | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tools_turn(tools: Sequence[Mapping[str, Any]], system: str = "") -> str:
    """The turn that shows tools, after what the system says."""
    lines = [system] if system else []
    lines.append("Tools:")
    for function in (tool["function"] for tool in tools):
        properties = function["parameters"]["properties"]
        arguments = ", ".join(f'"{key}": "{value["type"]}"' for key, value in properties.items())
        described = f"{function['description']} " if function["description"] else ""
        lines.append(f'{described}{{"name": "{function["name"]}", "arguments": {{{arguments}}}}}')
    return turn("system", "\n".join(lines))


def call(text: str) -> str:
    """A call of a tool, given as JSON, in Hermes' form."""
    return f"<tool_call>\n{text}\n</tool_call>"


def user(text: str, media: int = 0, *, is_text_first: bool = False, is_video: bool = False) -> str:
    """`media` is how many pictures or videos are shown."""
    seen = f"{VISION_START}{VIDEO if is_video else IMAGE}{VISION_END}" * media
    return turn("user", text + seen if is_text_first else seen + text)


def assistant(text: str) -> str:
    return turn("assistant", text)


def turn(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}\n"
