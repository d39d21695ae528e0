"""Ask about pictures and videos from Python, all at once, and see what they cost.

python examples/describe.py [--model MODEL] [FILE ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from saccade import LLM, RequestOutput, SamplingParams

HERE = Path(__file__).parent
FILES = [HERE / "shapes.png", HERE / "clip.webm"]
VIDEOS = (".mp4", ".mov", ".webm", ".mkv", ".avi")


def main(model: str | None, files: list[Path]) -> None:
    with LLM(model=model) as llm:  # its memory is free behind the block
        outs = llm.chat([messages(file) for file in files], SamplingParams(temperature=0, max_tokens=48))
    for file, out in zip(files, outs, strict=True):
        show(file, out)


def messages(file: Path) -> list[dict[str, Any]]:
    kind, noun = ("video", "video") if file.suffix.lower() in VIDEOS else ("image", "picture")
    content = [{"type": kind, kind: file}, {"type": "text", "text": f"Describe the {noun}."}]
    return [{"role": "user", "content": content}]


def show(file: Path, out: RequestOutput) -> None:
    if out.error is not None or out.bill is None:  # the others were answered all the same
        print(f"{file}: {out.error}")
        return
    (item,) = out.bill.items
    frames = f"{item.frames} frames of " if item.kind == "video" else ""
    print(f"{file}: {frames}{item.width}x{item.height} -> {item.tokens} tokens, {item.kv_blocks} KV blocks")
    print(f"  {out.outputs[0].text}")
    print(f"  milliseconds: {dict(out.bill.times_ms)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; nothing: the built-in model")
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="nothing: shapes.png and clip.webm here")
    args = parser.parse_args()
    main(args.model, args.files)
