"""Writes the held-out questions as a question set for `saccade eval`: `python -m training.held_out --out FILE.zip`.

Fonts differ between machines, a file does not: the set is drawn once, where all fonts are, and comes with the package.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.evaluation.image_noise import field_to_image
from saccade.evaluation.questions import ABOUT, QUESTIONS, load_questions
from training.canvas import noise_field
from training.fonts import WANTED, font_names
from training.samples import Picture, Sample
from training.scenes import held_out

FIELD = "grain.png"
ABOUT_SET = {
    "name": "Saccade's held-out questions",
    "goals": {
        "color": 0.95,
        "shape": 0.95,
        "position": 0.95,
        "count": 0.90,
        "words": 0.85,
        "numbers": 0.85,
        "charts and tables": 0.85,
    },
    "groups": {
        "shapes": ["color", "shape", "size", "position", "count", "several", "absent", "json", "caption"],
        "reading": ["words", "numbers"],
        "charts and tables": ["chart", "table"],
    },
}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same samples make the same file, byte for byte


def write(out: Path, samples: Sequence[Sample]) -> None:
    with zipfile.ZipFile(out, "w") as archive:
        _add(archive, ABOUT, json.dumps(ABOUT_SET, indent=1).encode())
        lines = []
        for number, made in enumerate(samples):
            files = [f"{number:04}-{i}.png" for i in range(len(made.pictures))]
            for file, picture in zip(files, made.pictures, strict=True):
                _add(archive, file, smallest_png(picture.clean))
            lines.append(json.dumps(_line(number, made, files)))
        _add(archive, FIELD, smallest_png(field_to_image(noise_field())))
        _add(archive, QUESTIONS, "\n".join(lines).encode())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    method = zipfile.ZIP_STORED if name.endswith(".png") else zipfile.ZIP_DEFLATED
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, method, 9)


def _line(number: int, made: Sample, files: Sequence[str]) -> dict[str, Any]:
    question = made.questions[0]
    rule = question.rule
    return {
        "id": f"{made.skill}-{number:04}",
        "skill": made.skill,
        "pictures": [_picture(file, picture) for file, picture in zip(files, made.pictures, strict=True)],
        "question": question.text,
        "answers": rule.answers,
        "match": rule.match,
        "forbidden": rule.forbidden,
    }


def _picture(file: str, picture: Picture) -> str | dict[str, Any]:
    return {"file": file, "grain": {"field": FIELD, **picture.grain._asdict()}} if picture.grain else file


def smallest_png(image: Image.Image) -> bytes:
    """With a palette where the colours fit one, which changes no pixel."""
    pixels = np.asarray(image).reshape(-1, 3)
    colors, indices = np.unique(pixels, axis=0, return_inverse=True)  # Pillow's own search takes the nearest by guess
    if len(colors) <= 256:
        image = Image.frombytes("P", image.size, indices.astype(np.uint8).tobytes())
        image.putpalette(colors.tobytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def check(out: Path, samples: Sequence[Sample]) -> None:
    """Whoever reads the file gets the pixels that were drawn."""
    made = load_questions(str(out))
    for question, sample in zip(made.questions, samples, strict=True):
        for ref, picture in zip(question.images, sample.pictures, strict=True):
            read = Image.open(io.BytesIO(made.image(ref).data)).convert("RGB")
            assert read.size == picture.image.size, f"{ref.file} has another size than was drawn"
            assert read.tobytes() == picture.image.tobytes(), f"{ref.file} differs from what was drawn"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.zip")
    parser.add_argument("--count", type=int, default=1000, help="questions (default: 1000)")
    args = parser.parse_args()
    if len(font_names()) <= len(WANTED):
        parser.error(f"only {len(font_names()) - 1} of {len(WANTED)} fonts are here: install DejaVu, core and extra")
    samples = list(held_out(args.count))
    write(args.out, samples)
    check(args.out, samples)
    print(f"{args.out}: {len(samples)} questions, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
