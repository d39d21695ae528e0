"""Drive the engine step by step: stream two requests at once and watch the caches fill.

python examples/step_by_hand.py [--model MODEL] [PICTURE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from saccade import LLM, SamplingParams

SHAPES = Path(__file__).with_name("shapes.png")


def main(model: str | None, picture: Path) -> None:
    llm = LLM(model=model)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=12)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]}]
    engine.add_chat("with picture", messages, params)
    engine.add_chat("text only", [{"role": "user", "content": "Hello"}], params)
    while engine.has_unfinished_requests():
        for out in engine.step():
            print(f"{out.request_id:>13}: {out.outputs[0].text!r}")
    stats = llm.stats()
    print("KV blocks:", stats["kv"])
    print("encoder cache:", stats["encoder_cache"])
    llm.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; nothing: the built-in model")
    parser.add_argument("picture", nargs="?", type=Path, default=SHAPES, help="nothing: examples/shapes.png")
    args = parser.parse_args()
    main(args.model, args.picture)
