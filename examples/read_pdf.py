"""Ask about pages of a PDF, and see what each costs. Without a file, a PDF of a receipt is made first.

python examples/read_pdf.py [--model MODEL] [--pages 1-3,7] [FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from PIL import Image

from saccade import LLM, SamplingParams

RECEIPT = Path(__file__).with_name("receipt.png")


def main(model: str | None, file: Path, pages: str | None) -> None:
    part = {"type": "document", "document": file, "pages": pages, "text_layer": True}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is the total?"}]}]
    with LLM(model=model) as llm:
        out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))[0]
    print(out.outputs[0].text)
    for item in out.bill.items:
        print(f"a page of {item.width}x{item.height} pixels -> {item.tokens} tokens, {item.kv_blocks} KV blocks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; nothing: the built-in model")
    parser.add_argument("--pages", help='such as "1-3,7"; nothing: all')
    parser.add_argument("file", nargs="?", type=Path, help="a PDF; nothing: one of examples/receipt.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.file is None:
            args.file = Path(folder) / "receipt.pdf"
            Image.open(RECEIPT).save(args.file)
        main(args.model, args.file, args.pages)
