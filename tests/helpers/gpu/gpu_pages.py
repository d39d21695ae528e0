"""Pages a second of document readers, random weights in published shapes: `python -m tests.helpers.gpu.gpu_pages NAME`.

Starts `saccade serve` and runs `saccade bench documents` on it, once for each number of pages at a time. `busy`: median
of what nvidia-smi calls the GPU's utilisation meanwhile. Options after the name go to the server.

paddleocr_vl   PaddleOCR-VL-0.9B: the defaults of Transformers' config of it; 1080p pages, 128 tokens out
mineru2_5      MinerU2.5-2509-1.2B: Qwen2-VL's tower (675M) and Qwen2-0.5B with M-RoPE, as its paper has it
               (arXiv 2509.22186); A4 pages of PDFs at 200 dpi, 600 tokens out, at most 1,605,632 pixels a page
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.gpu_shapes import QWEN_IMAGES, SHAPES, Shape, write_folder
from saccade.apps.evaluation.serving import serving_with

LIMIT = 460.0  # seconds, after which the stacks are printed and it ends
_BENCH_SECONDS = 200.0
_MINERU_TEXT = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}
_PADDLE_TEXT = {
    "model_type": "paddleocr_vl_text",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [16, 24, 24]},
}
_PADDLE_TOWER = {
    "model_type": "paddleocr_vl_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
_PADDLE_IMAGES = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "size": {"shortest_edge": 147384, "longest_edge": 2822400},
}
_PADDLE_TOKENS = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


class Reader(NamedTuple):
    shape: Shape
    image: str  # in its chat template
    processor: Mapping[str, Any]  # processor_config.json
    server: tuple[str, ...]
    load: tuple[str, ...]
    levels: tuple[int, ...]


def _mineru(name: str, base: str, text: Mapping[str, Any], tower: Mapping[str, Any], pixels: int) -> Reader:
    config = {**SHAPES[base].config, **text}
    config["vision_config"] = {**config["vision_config"], **tower}
    shape = replace(SHAPES[base], name=name, config=config, images={**QWEN_IMAGES, "max_pixels": pixels})
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    load = ("--pdf", "4", "--output-tokens", "600")
    return Reader(shape, pad, {}, ("--document-dpi", "200"), load, (1, 16, 32))


def _paddle(name: str, text: Mapping[str, Any], tower: Mapping[str, Any]) -> Reader:
    first = 100295
    config = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "model_type": "paddleocr_vl",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": first,
        "vision_start_token_id": first + 1,
        "vision_end_token_id": first + 2,
        "text_config": {**_PADDLE_TEXT, **text},
        "vision_config": {**_PADDLE_TOWER, **tower},
    }
    image = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    shape = Shape(name, config, {}, _PADDLE_TOKENS, first, image)
    processor = {"processor_class": "PaddleOCRVLProcessor", "image_processor": _PADDLE_IMAGES}
    load = ("--size", "1920x1080", "--output-tokens", "128")
    return Reader(shape, image, processor, ("--dtype", "bfloat16"), load, (1, 32))


_TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
READERS: dict[str, Reader] = {
    "paddleocr_vl": _paddle("paddleocr_vl", {}, {}),
    "mineru2_5": _mineru("mineru2_5", "qwen2_vl_2b", _MINERU_TEXT, {"hidden_size": 896}, 1605632),
}
_TRIAL = ("--size", "320x240", "--requests", "4", "--output-tokens", "4")
READERS |= {  # to try the script on
    "tiny_paddle": _paddle("tiny_paddle", {**_TINY, "head_dim": 128}, _TINY)._replace(load=_TRIAL),
    "tiny_mineru": _mineru("tiny_mineru", "tiny", {}, {}, 200_000)._replace(load=("--pdf", "2", *_TRIAL)),
}


def main(arguments: Sequence[str]) -> int:
    name, *options = arguments
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    reader = READERS[name]
    with tempfile.TemporaryDirectory() as folder:
        write(reader, Path(folder))
        usual = ["--load-format", "dummy", "--max-model-len", "8192", "--max-num-seqs", "32"]
        flags = [folder, *usual, "--no-access-log", *reader.server, *options]
        with serving_with(flags, show_log=True) as server:
            codes = [measure(server.url, reader, clients) for clients in reader.levels]
    return max(codes)


def write(reader: Reader, folder: Path) -> None:
    write_folder(reader.shape, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", reader.image))
    if reader.processor:
        (folder / "preprocessor_config.json").unlink(missing_ok=True)
        _write(folder / "processor_config.json", reader.processor)
        tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": _PADDLE_TOKENS[0]}
        _write(folder / "tokenizer_config.json", {**tokens, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})


def measure(url: str, reader: Reader, clients: int) -> int:
    command = [sys.executable, "-m", "saccade.cli", "bench", "documents", "--url", url, *reader.load, "--quiet"]
    level = ("--concurrency", str(clients), "--seed", str(clients))  # of each other pages
    with tempfile.TemporaryFile("w+") as samples:
        watch = _watch(samples)
        try:
            code = subprocess.run([*command, *level], timeout=_BENCH_SECONDS).returncode
        finally:
            if watch:
                watch.terminate()
                watch.wait()
        samples.seek(0)
        busy = [float(line) for line in samples if line.strip().isdigit()]
    print(f"{reader.shape.name}: busy {statistics.median(busy) if busy else 0:.0f}%", flush=True)
    return code


def _watch(into: IO[str]) -> subprocess.Popen[str] | None:
    """None without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    return subprocess.Popen([program, *query], stdout=into, stderr=subprocess.DEVNULL, text=True)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
