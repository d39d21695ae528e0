"""The chat format: what the template writes, written again in Python for speed. A test compares the two."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
START, END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIALS = (END_OF_TEXT, START, END, VISION_START, VISION_END, "<|vision_pad|>", IMAGE, VIDEO)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or part['type'] == 'image_url' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str, pictures: int = 0, *, is_text_first: bool = False) -> str:
    seen = f"{VISION_START}{IMAGE}{VISION_END}" * pictures
    return turn("user", text + seen if is_text_first else seen + text)


def assistant(text: str) -> str:
    return turn("assistant", text)


def turn(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}\n"
