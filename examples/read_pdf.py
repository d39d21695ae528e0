"""Ask about pages of a PDF: what they cost, before and after. A picture is first made a PDF of one page.

python examples/read_pdf.py MODEL FILE [PAGES]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from saccade import LLM, SamplingParams


def main(model: str, file: str, pages: str = "1") -> None:
    with tempfile.TemporaryDirectory() as folder, LLM(model=model) as llm:
        path = Path(file)
        if path.suffix != ".pdf":
            path = Path(folder) / "page.pdf"
            Image.open(file).convert("RGB").save(path)
        part = {"type": "document", "document": path, "pages": pages, "text_layer": True}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Describe this in one sentence."}]}]
        out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))[0]
    print(out.outputs[0].text)
    for item in out.bill.items:
        print(f"a page of {item.width}x{item.height} pixels -> {item.tokens} tokens, {item.kv_blocks} KV blocks")


if __name__ == "__main__":
    main(*sys.argv[1:])
