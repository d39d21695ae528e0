"""Ask about pictures from Python, and see what they cost.

python examples/describe.py MODEL PICTURE [PICTURE ...]
"""

from __future__ import annotations

import sys

from saccade import LLM, SamplingParams


def main(model: str, *pictures: str) -> None:
    content = [{"type": "image", "image": path} for path in pictures]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "Describe this in one sentence."}]}]
    with LLM(model=model, limit_mm_per_prompt={"image": len(pictures)}) as llm:  # its memory is free behind the block
        out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))[0]
    print(out.outputs[0].text)
    for path, item in zip(pictures, out.bill.items, strict=True):
        print(f"{path}: {item.width}x{item.height} -> {item.tokens} tokens, {item.kv_blocks} KV blocks")
    print("milliseconds:", dict(out.bill.times_ms))


if __name__ == "__main__":
    main(*sys.argv[1:])
