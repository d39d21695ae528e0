"""Read a receipt as JSON under a schema, let the model call a tool with what it reads, and see how sure it was.

python examples/receipt.py [--model MODEL] [PICTURE]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from saccade import LLM, SamplingParams

RECEIPT = Path(__file__).with_name("receipt.png")
SCHEMA = {
    "type": "object",
    "properties": {"shop": {"type": "string"}, "date": {"type": "string"}, "total": {"type": "number"}},
    "required": ["shop", "date", "total"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "save_receipt", "description": "Save the shop, date and total.", "parameters": SCHEMA},
}


def main(model: str | None, picture: Path) -> None:
    under_schema = SamplingParams(temperature=0, max_tokens=128, structured_outputs={"json": SCHEMA})
    free = SamplingParams(temperature=0, max_tokens=128, logprobs=1)
    with LLM(model=model) as llm:
        read = llm.chat(asked("Extract the data as JSON.", picture), under_schema)[0].outputs[0]
        call = llm.chat(asked("Save the receipt.", picture), free, tools=[TOOL])[0].outputs[0]
    print(read.text if read.finish_reason == "stop" else f"{read.text} (cut off)")
    print(call.text)
    # Of what the model was free to say. Keys that a schema dictates would count as unlikely.
    assert call.cumulative_logprob is not None  # logprobs were asked for
    print(f"probability: {math.exp(call.cumulative_logprob):.2f}")


def asked(text: str, picture: Path) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; nothing: the built-in model")
    parser.add_argument("picture", nargs="?", type=Path, default=RECEIPT, help="nothing: examples/receipt.png")
    args = parser.parse_args()
    main(args.model, args.picture)
