"""Writes the held-out questions as a question set for `saccade eval`: `python -m training.held_out --out FILE.zip`.

Fonts differ between machines, a file does not: the set is drawn once, where all fonts are, and comes with the package.
`--skills document,extract` adds skills to a set, or draws them again; other questions stay as they are.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.apps.evaluation.image_noise import field_to_image
from saccade.apps.evaluation.questions import ABOUT, QUESTIONS, load_questions
from training.canvas import noise_field
from training.fonts import WANTED, font_names
from training.refusals import REFUSED
from training.samples import FIRST_SKILLS, SKILLS, Picture, Sample
from training.scenes import held_out, plans

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
        "chart": 0.97,
        "table": 0.90,
        "charts and tables": 0.85,
        "extract fields": 0.90,
        "extract valid": 1.0,
        "refuse": 0.95,
        "video": 0.85,
        "not refused": 0.99,
    },
    "groups": {
        "shapes": ["color", "shape", "size", "position", "count", "several", "absent", "json", "caption"],
        "reading": ["words", "numbers"],
        "documents": ["document", "extract", "tool"],
        "comparing and choosing": ["compare", "choice"],
        "charts and tables": ["chart", "table"],
    },
    "refusal": REFUSED,
}
_LICENCES = """Pictures named refuse-*.jpg are made by training/textures.py, or are parts of pictures that come with
scikit-image and matplotlib. All others are drawn by training/.

astronaut, hubble_deep_field: NASA, public domain
brick, gravel: CC0Textures, CC0
camera: Lav Varshney, CC0
chelsea: Stefan van der Walt, CC0
coffee: Rachel Michetti, CC0
coins: Brooklyn Museum, no known restrictions
grass: linolafett, CC0
retina: Mikael Haggstrom, CC0
rocket: SpaceX, public domain
grace_hopper: US Navy, public domain
"""
_NEAR = 30.0  # mean difference of a channel that JPEG may make
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same samples make the same file, byte for byte


def write(out: Path, samples: Sequence[Sample]) -> None:
    with zipfile.ZipFile(out, "w") as archive:
        _add(archive, ABOUT, json.dumps(ABOUT_SET, indent=1).encode())
        lines = [_added(archive, made, f"{number:04}") for number, made in enumerate(samples)]
        _add(archive, FIELD, smallest_png(field_to_image(noise_field())))
        _add(archive, QUESTIONS, "\n".join(lines).encode())


def extend(out: Path, samples: Sequence[Sample]) -> None:
    """Put these samples behind the set's questions about other skills."""
    skills = {made.skill for made in samples}
    with zipfile.ZipFile(out) as archive:
        lines = [
            line for line in archive.read(QUESTIONS).decode().splitlines() if json.loads(line)["skill"] not in skills
        ]
        used = {FIELD, *(_file(shown) for line in lines for shown in _shown(json.loads(line)))}
        kept = {name: archive.read(name) for name in archive.namelist() if name in used}
    counts: Counter[str] = Counter()
    with zipfile.ZipFile(out, "w") as archive:
        _add(archive, ABOUT, json.dumps(ABOUT_SET, indent=1).encode())
        _add(archive, "LICENCES.txt", _LICENCES.encode())
        for name, data in kept.items():
            _add(archive, name, data)
        for made in samples:
            counts[made.skill] += 1
            lines.append(_added(archive, made, f"{made.skill}-{counts[made.skill]:03}"))
        _add(archive, QUESTIONS, "\n".join(lines).encode())


def _shown(line: dict[str, Any]) -> list[Any]:
    return [*line.get("pictures", ()), *line.get("video", ())]


def _file(picture: Any) -> str:
    return str(picture["file"] if isinstance(picture, dict) else picture)


def _added(archive: zipfile.ZipFile, made: Sample, name: str) -> str:
    """The line of a sample, whose pictures are added under this name."""
    is_drawn = made.skill != "refuse"
    files = [f"{name}-{i}.{'png' if is_drawn else 'jpg'}" for i in range(len(made.pictures))]
    for file, picture in zip(files, made.pictures, strict=True):
        _add(archive, file, smallest_png(picture.clean) if is_drawn else _jpeg(picture.image))
    return json.dumps(_line(name, made, files))


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    method = zipfile.ZIP_STORED if name.endswith((".png", ".jpg")) else zipfile.ZIP_DEFLATED
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, method, 9)


def _line(name: str, made: Sample, files: Sequence[str]) -> dict[str, Any]:
    question = made.questions[0]
    rule = question.rule
    return {
        "id": name if name.startswith(made.skill) else f"{made.skill}-{name}",
        "skill": made.skill,
        "video" if made.is_video else "pictures": [
            _picture(file, picture) for file, picture in zip(files, made.pictures, strict=True)
        ],
        "question": question.text,
        "answers": rule.answers,
        "match": rule.match,
        "forbidden": rule.forbidden,
        **({"request": question.request} if question.request else {}),
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


def _jpeg(image: Image.Image) -> bytes:
    """Photographs and textures: without loss they would be ten times as large."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=72, optimize=True)
    return stream.getvalue()


def check(out: Path, samples: Sequence[Sample]) -> None:
    """Whoever reads the end of the file gets the pixels that were drawn."""
    made = load_questions(str(out))
    for question, sample in zip(made.questions[-len(samples) :], samples, strict=True):
        for ref, picture in zip(question.video or question.images, sample.pictures, strict=True):
            read = Image.open(io.BytesIO(made.image(ref).data)).convert("RGB")
            assert read.size == picture.image.size, f"{ref.file} has another size than was drawn"
            off = np.abs(np.asarray(read, np.int16) - np.asarray(picture.image, np.int16)).mean()
            assert off <= (_NEAR if ref.file.endswith(".jpg") else 0.0), f"{ref.file} differs from what was drawn"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.zip")
    parser.add_argument("--count", type=int, help="questions (default: 1000, or 72 of each of --skills)")
    parser.add_argument("--skills", help="add only these to the file, which is there; with commas")
    parser.add_argument("--photos", type=Path, help="folder with held_out/: pictures to refuse, besides textures")
    args = parser.parse_args()
    if len(font_names()) <= len(WANTED):
        parser.error(f"only {len(font_names()) - 1} of {len(WANTED)} fonts are here: install DejaVu, core and extra")
    skills = tuple(args.skills.split(",")) if args.skills else FIRST_SKILLS
    if unknown := set(skills) - set(SKILLS):
        parser.error(f"{', '.join(sorted(unknown))} is no skill; they are {', '.join(SKILLS)}")
    count = args.count or (72 * len(skills) if args.skills else 1000)
    samples = list(held_out(count, skills, plans(args.photos).held_out))
    (extend if args.skills else write)(args.out, samples)
    check(args.out, samples)
    print(f"{args.out}: {len(samples)} questions, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
