"""Pictures that are no drawings of ours: textures, maps, landscapes, faces, renders. Made on the spot, from noise.

`TRAINED` and `HELD_OUT` are different families: a model that refuses the second has learned more than a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from random import Random

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

Size = tuple[int, int]  # width, height
Floats = npt.NDArray[np.float32]
Texture = Callable[[Random, Size], Image.Image]
_CLOUDS, _ROUGH = 3, (0.5, 0.6, 0.8)


# --- what they are made of ----------------------------------------------------------------------------------------


def _numpy(rng: Random) -> np.random.Generator:
    return np.random.default_rng(rng.getrandbits(32))


def _noise(make: np.random.Generator, size: Size, cells: int) -> Floats:
    """Smooth noise [height, width] in 0..1, with about `cells` hills along a side."""
    small = make.integers(0, 256, (cells + 1, cells + 1), np.uint8)
    return np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC), np.float32) * np.float32(1 / 255)


@cache
def _cloud(number: int, rough: float) -> Image.Image:
    """Smooth noise, plus finer and weaker noise: 8 hills along a side."""
    make, cells, weight, side = np.random.default_rng(number), 8, 1.0, 512
    total = np.zeros((side, side), np.float32)
    while cells < side:
        total += weight * (_noise(make, (side, side), cells) - 0.5)
        weight, cells = weight * rough, cells * 2
    spread = 3.2 * total.std()
    return Image.fromarray(((total / spread + 0.5) * 255).clip(0, 255).astype(np.uint8))


def clouds(rng: Random, size: Size, rough: float = 0.5, hills: float | None = None) -> Floats:
    """Noise in 0..1, [height, width]: a window of a fixed cloud, since octaves of fresh noise would take longer."""
    cloud = _cloud(rng.randrange(_CLOUDS), rough)
    side = cloud.width * min(1.0, (hills or rng.uniform(1.5, 6)) / 8)
    wide, high = side, side * rng.uniform(0.7, 1.0)
    left, top = rng.uniform(0, cloud.width - wide), rng.uniform(0, cloud.height - high)
    box = (left, top, left + wide, top + high)
    window = cloud.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=1.0)
    return np.asarray(window, np.float32) * np.float32(1 / 255)


def _color(rng: Random, low: int = 0, high: int = 255) -> Floats:
    return np.array([rng.randint(low, high) for _ in range(3)], np.float32)


def _mapped(rng: Random, values: npt.NDArray[np.floating], stops: int = 4) -> Image.Image:
    """Values 0..1 through a random colour map."""
    table = np.stack([_color(rng) for _ in range(stops)])
    ramp = np.linspace(0, stops - 1, 256)
    low = np.minimum(ramp.astype(int), stops - 2)
    part = (ramp - low)[:, None]
    colors = (table[low] * (1 - part) + table[low + 1] * part).astype(np.uint8)
    return Image.fromarray(colors[(values.clip(0, 1) * 255).astype(np.uint8)])


def _image(pixels: npt.NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _grid(size: Size) -> tuple[Floats, Floats]:
    """y and x of each pixel, -1..1."""
    y = np.linspace(-1, 1, size[1], dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, size[0], dtype=np.float32)[None]
    return np.broadcast_to(y, size[::-1]), np.broadcast_to(x, size[::-1])


def _half(size: Size) -> Size:
    return max(8, size[0] // 2), max(8, size[1] // 2)


# --- families to train on -----------------------------------------------------------------------------------------


def plasma(rng: Random, size: Size) -> Image.Image:
    rough = rng.choice(_ROUGH)
    if rng.random() < 0.5:
        return _mapped(rng, (clouds(rng, size, rough) - 0.5) * rng.uniform(1.2, 2.5) + 0.5, rng.randint(2, 6))
    return _image(np.stack([clouds(rng, size, rough) * 255 for _ in range(3)], axis=-1))


def static(rng: Random, size: Size) -> Image.Image:
    """Noise of a dead channel or a dark camera: grey or coloured, fine or coarse, with scan lines."""
    make, grain = _numpy(rng), rng.choice((1, 1, 2, 3, 5))
    shape = size[1] // grain + 1, size[0] // grain + 1
    channels = make.integers(0, 256, (*shape, 3), np.uint8)
    if rng.random() < 0.5:
        channels = np.repeat(channels[..., :1], 3, axis=-1)
    noise = np.asarray(Image.fromarray(channels).resize(size, Image.Resampling.NEAREST), np.float32)
    weight = rng.choice((1.0, rng.uniform(0.3, 0.9)))
    under = np.asarray(gradient(rng, size), np.float32) if weight < 1 else 128.0
    pixels = under * (1 - weight) + noise * weight
    if rng.random() < 0.4:
        pixels[:: rng.randint(2, 4)] *= rng.uniform(0.3, 0.8)
    return _image(pixels)


def gradient(rng: Random, size: Size) -> Image.Image:
    y, x = _grid(size)
    turn, kind = rng.uniform(0, 2 * math.pi), rng.random()
    if kind < 0.5:
        values = (x * math.cos(turn) + y * math.sin(turn)) * 0.4 + 0.5
    elif kind < 0.8:
        values = np.hypot(x - rng.uniform(-1, 1), y - rng.uniform(-1, 1)) * rng.uniform(0.4, 0.8)
    else:
        values = np.arctan2(y - rng.uniform(-0.5, 0.5), x) / (2 * np.float32(math.pi)) + 0.5
    return _mapped(rng, values, rng.randint(2, 5))


def cells(rng: Random, size: Size) -> Image.Image:
    """A political map: regions around seeds, with borders, roads and towns."""
    small, count = _half(size), rng.randint(6, 18)
    y, x = _grid(small)
    wobble = clouds(rng, small, hills=4) * rng.uniform(0.0, 0.6)
    places = [(rng.uniform(-1.1, 1.1), rng.uniform(-1.1, 1.1)) for _ in range(count)]
    distances = np.stack([np.hypot(x - a + wobble, y - b - wobble) for a, b in places])
    nearest = distances.argmin(0)
    palette = np.stack([_color(rng, 90, 250) for _ in range(count)]).astype(np.uint8)
    image = Image.fromarray(palette[nearest]).resize(size, Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 6)):
        _road(rng, pen, size)
    return image


def _road(rng: Random, pen: ImageDraw.ImageDraw, size: Size) -> None:
    x, y, turn = rng.uniform(0, size[0]), rng.uniform(0, size[1]), rng.uniform(0, 2 * math.pi)
    points = []
    for _ in range(rng.randint(5, 20)):
        points.append((x, y))
        turn += rng.uniform(-0.6, 0.6)
        x, y = x + 16 * math.cos(turn), y + 16 * math.sin(turn)
    wide = rng.randint(1, 5)
    pen.line(points, fill=_tuple(_color(rng, 0, 120)), width=wide + 2)
    pen.line(points, fill=_tuple(_color(rng, 180, 255)), width=wide)


def _tuple(color: Floats) -> tuple[int, int, int]:
    return int(color[0]), int(color[1]), int(color[2])


def streets(rng: Random, size: Size) -> Image.Image:
    """A town from above: streets in a turned grid, blocks, parks and water."""
    ground = _tuple(_color(rng, 190, 245))
    image = Image.new("RGB", size, ground)
    pen = ImageDraw.Draw(image)
    step, turn = rng.uniform(10, 24), rng.uniform(-0.7, 0.7)
    cos, sin, reach = math.cos(turn), math.sin(turn), int(max(size) / step) + 1
    tint = [_tuple(_color(rng, 120, 230)) for _ in range(4)]
    for i in range(-reach, reach):
        for j in range(-reach, reach):
            if rng.random() < 0.12:
                continue
            u, v = i * step + size[0] / 2, j * step
            a, b = step * rng.uniform(0.6, 0.9), step * rng.uniform(0.6, 0.9)
            corners = [(u, v), (u + a, v), (u + a, v + b), (u, v + b)]
            turned = [(p * cos - q * sin, p * sin + q * cos) for p, q in corners]
            pen.polygon(turned, fill=rng.choice(tint), outline=(110, 110, 110) if step > 18 else None)
    for _ in range(rng.randint(0, 3)):
        _road(rng, pen, size)
    return image


def fractal(rng: Random, size: Size) -> Image.Image:
    small = _half(size)
    y, x = _grid(small)
    zoom, at = rng.uniform(0.4, 1.5), complex(rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5))
    z = ((x + 1j * y) * zoom + at).astype(np.complex64)
    turn = rng.uniform(0, 2 * math.pi)
    c = np.complex64(0.7885 * complex(math.cos(turn), math.sin(turn)))
    steps, limit = np.zeros(z.shape, np.float32), rng.randint(14, 24)
    for _ in range(limit):
        z = z * z + c
        inside = np.abs(z) < 4
        steps += inside
        z = np.where(inside, z, 4)
    return _mapped(rng, steps / limit, rng.randint(3, 6)).resize(size, Image.Resampling.BILINEAR)


def bokeh(rng: Random, size: Size) -> Image.Image:
    """Lights out of focus."""
    image = gradient(rng, _half(size))
    pen = ImageDraw.Draw(image, "RGBA")
    for _ in range(rng.randint(15, 40)):
        x, y, r = rng.uniform(0, image.width), rng.uniform(0, image.height), rng.uniform(2, 22)
        pen.ellipse((x - r, y - r, x + r, y + r), fill=(*_tuple(_color(rng)), rng.randint(60, 200)))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(2, 6))).resize(size, Image.Resampling.BICUBIC)


def face(rng: Random, size: Size) -> Image.Image:
    """A portrait: shaded skin, hair, eyes, a mouth, before something blurred."""
    image = rng.choice((gradient, bokeh, plasma))(rng, size).filter(ImageFilter.GaussianBlur(3))
    short = min(size)
    cx, cy, r = size[0] * rng.uniform(0.35, 0.65), size[1] * rng.uniform(0.4, 0.6), short * rng.uniform(0.22, 0.42)
    tone = rng.uniform(0.3, 1.0)
    skin = np.array([235, 190, 160], np.float32) * tone + rng.uniform(-12, 12)
    hair = _tuple(_color(rng, 10, 130))
    pen = ImageDraw.Draw(image)

    def oval(x: float, y: float, a: float, b: float, color: tuple[int, int, int]) -> None:
        pen.ellipse((cx + r * (x - a), cy + r * (y - b), cx + r * (x + a), cy + r * (y + b)), fill=color)

    oval(0, 1.9, 1.4, 0.9, _tuple(_color(rng)))  # shoulders
    oval(0, 0.9, 0.35, 0.6, _tuple(skin * 0.85))
    oval(0, -0.25, 1.0, 1.15, hair)
    oval(0, 0, 0.8, 1.05, _tuple(skin))
    for side in (-1, 1):
        oval(0.32 * side, -0.15, 0.15, 0.09, (240, 240, 238))
        oval(0.32 * side, -0.15, 0.07, 0.08, _tuple(_color(rng, 10, 110)))
        oval(0.32 * side, -0.33, 0.2, 0.04, hair)
    oval(0, 0.15, 0.09, 0.2, _tuple(skin * 0.88))
    oval(0, 0.55, 0.3, rng.uniform(0.05, 0.12), _tuple(np.array([190, 90, 90], np.float32) * (0.5 + tone / 2)))
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(rng.uniform(0.8, 2.5))), np.float32)
    light = 0.65 + 0.6 * clouds(rng, size, hills=2)
    return _image(soft * light[..., None])


def bricks(rng: Random, size: Size) -> Image.Image:
    high, wide = rng.randint(8, 26), rng.randint(14, 56)
    image = Image.new("RGB", size, _tuple(_color(rng, 120, 230)))
    pen, base = ImageDraw.Draw(image), _color(rng, 40, 200)
    for row in range(size[1] // high + 1):
        for column in range(-1, size[0] // wide + 1):
            x, y = column * wide + (row % 2) * wide // 2, row * high
            pen.rectangle((x + 1, y + 1, x + wide - 2, y + high - 2), fill=_tuple(base + rng.uniform(-30, 30)))
    rough = 0.55 + 0.9 * clouds(rng, size, 0.8, hills=8)
    return _image(np.asarray(image, np.float32) * rough[..., None])


def stars(rng: Random, size: Size) -> Image.Image:
    make = _numpy(rng)
    cloud = np.asarray(plasma(rng, size), np.float32) * rng.uniform(0.05, 0.5)
    flat = cloud.reshape(-1, 3)
    count = int(len(flat) * rng.uniform(0.002, 0.02))
    flat[make.integers(0, len(flat), count)] = make.uniform(90, 255, (count, 1))
    image = _image(cloud)
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(2, 15)):
        x, y, r = rng.uniform(0, size[0]), rng.uniform(0, size[1]), rng.uniform(0.6, 2.5)
        pen.ellipse((x - r, y - r, x + r, y + r), fill=_tuple(_color(rng, 190, 255)))
    return image


def landscape(rng: Random, size: Size) -> Image.Image:
    """Sky, some ranges of hills, ground."""
    small = _half(size)
    y, _ = _grid(small)
    rows = (y + 1) / 2
    sky, haze = _color(rng, 90, 255), _color(rng, 120, 255)
    pixels = sky * (1 - rows[..., None]) + haze * rows[..., None]
    pixels += (clouds(rng, small)[..., None] - 0.5) * rng.uniform(0, 120)
    ranges, top = rng.randint(1, 4), rng.uniform(0.25, 0.5)
    for index in range(ranges):
        line = top + (clouds(rng, (small[0], 8), 0.6)[0] - 0.5) * rng.uniform(0.1, 0.5)
        ground = _color(rng, 10, 200) * (0.6 + 0.8 * clouds(rng, small, 0.8, hills=8))[..., None]
        pixels = np.where((rows > line)[..., None], ground, pixels)
        top += (1 - top) / (ranges - index) * rng.uniform(0.4, 0.9)
    return _image(pixels).resize(size, Image.Resampling.BICUBIC)


def balls(rng: Random, size: Size) -> Image.Image:
    """A render: shaded balls with highlights and shadows on a plane."""
    small = _half(size)
    y, x = _grid(small)
    horizon = rng.uniform(-0.4, 0.2)
    floor = _color(rng, 60, 220) * (1.2 - 0.5 * (y[..., None] - horizon))
    if rng.random() < 0.5:
        depth = 1 / np.maximum(y - horizon + 0.05, 0.05)
        checks = (np.floor(x * depth * 2) + np.floor(depth * 4)) % 2
        floor = floor * (0.5 + 0.5 * checks[..., None])
    wall = np.asarray(gradient(rng, small), np.float32)
    pixels = np.where((y > horizon)[..., None], floor, wall)
    light = np.array([rng.uniform(-0.7, 0.7), -0.7, 0.6], np.float32)
    light /= np.linalg.norm(light)
    wide = small[0] / small[1]
    for _ in range(rng.randint(1, 4)):
        r, cx, cy = rng.uniform(0.15, 0.5), rng.uniform(-0.8, 0.8), rng.uniform(-0.2, 0.7)
        shadow = ((x - cx - 0.3 * r) * wide / (1.2 * r)) ** 2 + ((y - cy - r) / (0.35 * r)) ** 2 < 1
        pixels = np.where(shadow[..., None], pixels * 0.5, pixels)
        u, v = (x - cx) * wide / r, (y - cy) / r
        z = np.sqrt(np.maximum(1 - u * u - v * v, 0))
        shade = np.maximum(u * light[0] + v * light[1] + z * light[2], 0)
        lit = _color(rng, 30, 255) * (0.2 + 0.8 * shade[..., None]) + 255 * (shade**20)[..., None] * rng.random()
        pixels = np.where((u * u + v * v < 1)[..., None], lit, pixels)
    return _image(pixels).resize(size, Image.Resampling.BICUBIC)


def waves(rng: Random, size: Size) -> Image.Image:
    y, x = _grid(size)
    total = np.zeros(size[::-1], np.float32)
    for _ in range(rng.randint(2, 5)):
        if rng.random() < 0.5:
            way = np.hypot(x - rng.uniform(-1, 1), y - rng.uniform(-1, 1))
        else:
            turn = rng.uniform(0, math.pi)
            way = x * math.cos(turn) + y * math.sin(turn)
        total += np.sin(way * rng.uniform(6, 60))
    return _mapped(rng, total / 6 + 0.5, rng.randint(2, 5))


def strokes(rng: Random, size: Size) -> Image.Image:
    """Grass, fur or scribbles: many short lines in shades of few colours."""
    image = Image.new("RGB", size, _tuple(_color(rng, 20, 200)))
    pen, base = ImageDraw.Draw(image), _color(rng, 40, 220)
    turn, spread, length = rng.uniform(0, math.pi), rng.uniform(0.2, 3), rng.uniform(6, 30)
    for _ in range(rng.randint(150, 500)):
        x, y, own = rng.uniform(0, size[0]), rng.uniform(0, size[1]), turn + rng.uniform(-spread, spread)
        tint = _tuple((base + rng.uniform(-60, 60)).clip(0, 255))
        pen.line((x, y, x + length * math.cos(own), y + length * math.sin(own)), fill=tint, width=rng.randint(1, 3))
    return image


# --- families kept for evaluation ---------------------------------------------------------------------------------


def marble(rng: Random, size: Size) -> Image.Image:
    y, x = _grid(size)
    warp = clouds(rng, size, 0.6)
    values = np.sin(x * rng.uniform(-4, 4) + y * rng.uniform(-4, 4) + warp * rng.uniform(3, 7))
    return _mapped(rng, np.abs(values) ** 0.5, 3)


def wood(rng: Random, size: Size) -> Image.Image:
    y, x = _grid(size)
    rings = np.hypot(x * rng.uniform(0.2, 0.6) + rng.uniform(-1, 1), y + rng.uniform(-1, 1)) * rng.uniform(6, 16)
    values = (rings + clouds(rng, size, 0.5) * 2) % 1.0
    base = np.array([rng.uniform(110, 200), rng.uniform(70, 130), rng.uniform(30, 80)], np.float32)
    fine = 0.8 + 0.4 * _noise(_numpy(rng), size, 60)
    return _image(base * (0.6 + 0.5 * values * fine)[..., None])


def relief(rng: Random, size: Size) -> Image.Image:
    """A terrain map with hill shading and a sea."""
    height = clouds(rng, size, 0.5)
    down, right = np.gradient(height)
    shading = (1 + 14 * (right + down)).clip(0.4, 1.5)
    land = np.asarray(_mapped(rng, height, 4), np.float32) * shading[..., None]
    sea = np.array([60, 110, 190], np.float32) * (0.6 + height)[..., None]
    return _image(np.where((height < rng.uniform(0.3, 0.5))[..., None], sea, land))


def corridor(rng: Random, size: Size) -> Image.Image:
    """A tunnel of rings seen from inside."""
    y, x = _grid(size)
    x, y = x - rng.uniform(-0.4, 0.4), y - rng.uniform(-0.4, 0.4)
    power = rng.choice((2, 4, 8))
    far = (np.abs(x) ** power + np.abs(y) ** power) ** (1 / power) + 0.04
    depth, angle = 0.6 / far, np.arctan2(y, x)
    checks = (np.floor(depth * 2) + np.floor(angle * rng.randint(2, 4))) % 2
    return _image(_color(rng, 80, 255) * ((0.35 + 0.65 * checks) * far.clip(0, 1))[..., None])


def painting(rng: Random, size: Size) -> Image.Image:
    """Broad dabs whose colours follow a cloud."""
    colors = np.asarray(plasma(rng, size))
    image = Image.new("RGB", size, _tuple(_color(rng)))
    pen, r = ImageDraw.Draw(image), rng.uniform(4, 12)
    for _ in range(rng.randint(300, 700)):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        pen.ellipse((x - r, y - r / 2, x + r, y + r / 2), fill=tuple(colors[y, x].tolist()))
    return image


def weave(rng: Random, size: Size) -> Image.Image:
    y, x = _grid(size)
    threads = rng.uniform(20, 60)
    over = np.sign(np.sin(x * threads) * np.sin(y * threads))
    light = np.where(over > 0, np.abs(np.cos(x * threads)), np.abs(np.cos(y * threads)))
    tints = np.where((over > 0)[..., None], _color(rng, 60, 255), _color(rng, 60, 255))
    return _image(tints * (0.3 + 0.7 * light * (0.6 + 0.8 * clouds(rng, size, 0.8)))[..., None])


def caustics(rng: Random, size: Size) -> Image.Image:
    """Light on the ground of a pool: distances to the two nearest of some points."""
    small = _half(size)
    y, x = _grid(small)
    places = [(rng.uniform(-1.2, 1.2), rng.uniform(-1.2, 1.2)) for _ in range(rng.randint(14, 30))]
    distances = np.sort(np.stack([np.hypot(x - a, y - b) for a, b in places]), axis=0)
    edge = np.exp(-(distances[1] - distances[0]) * rng.uniform(6, 20))
    base, bright = _color(rng, 0, 140), _color(rng, 170, 255)
    pixels = base * (1 - edge[..., None]) + bright * edge[..., None]
    return _image(pixels).resize(size, Image.Resampling.BICUBIC)


TRAINED: tuple[Texture, ...] = (
    *(plasma, static, gradient, cells, streets, fractal, bokeh),
    *(face, bricks, stars, landscape, balls, waves, strokes),
)
HELD_OUT: tuple[Texture, ...] = (marble, wood, relief, corridor, painting, weave, caustics)
