"""Ask about pictures from Python, and see what they cost.

python examples/describe.py [--model MODEL] [PICTURE ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from saccade import LLM, SamplingParams

SHAPES = Path(__file__).with_name("shapes.png")


def main(model: str | None, pictures: list[Path]) -> None:
    content = [{"type": "image", "image": path} for path in pictures]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "Describe this in one sentence."}]}]
    with LLM(model=model, limit_mm_per_prompt={"image": len(pictures)}) as llm:  # its memory is free behind the block
        out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))[0]
    print(out.outputs[0].text)
    for path, item in zip(pictures, out.bill.items, strict=True):
        print(f"{path}: {item.width}x{item.height} -> {item.tokens} tokens, {item.kv_blocks} KV blocks")
    print("milliseconds:", dict(out.bill.times_ms))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; nothing: the built-in model")
    parser.add_argument("pictures", nargs="*", type=Path, default=[SHAPES], help="nothing: examples/shapes.png")
    args = parser.parse_args()
    main(args.model, args.pictures)
