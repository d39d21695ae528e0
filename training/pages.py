"""Scenes of documents in small print: receipts, forms and letters. `page_questions` asks about them."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from training.canvas import Canvas
from training.fonts import Font, advance, font, font_names
from training.page_questions import ask_page
from training.palette import COLORS, Rgb, background, ink
from training.records import Field, Record, number_field, text_field, yes_field
from training.samples import Picture, Question
from training.sheet import Sheet
from training.words import COMMON, GOODS, PEOPLE, TOWNS, word

SMALLEST_PRINT = 12  # font size in pixels that the model card promises
SMALLEST_TRAINED = 11
_LARGEST = 17
_MARGIN = 5  # pixels


class Entry(NamedTuple):
    """A labelled value, in a line of its own."""

    label: str  # as it is drawn
    text: str
    field: Field


class Line(NamedTuple):
    left: str
    right: str = ""  # drawn at the right, or after a colon
    is_heading: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """What a document says, top to bottom."""

    noun: str
    heading: str = ""
    heading_field: Field | None = None
    entries: tuple[Entry, ...] = ()
    goods: tuple[tuple[str, str], ...] = ()  # things and prices
    after: tuple[Entry, ...] = ()  # entries below the goods
    body: tuple[str, ...] = ()  # lines of plain text

    def lines(self) -> list[Line]:
        return [
            *([Line(self.heading, is_heading=True)] if self.heading else []),
            *(Line(entry.label, entry.text) for entry in self.entries),
            *(Line(*one) for one in self.goods),
            *(Line(entry.label, entry.text) for entry in self.after),
            *(Line(text) for text in self.body),
        ]

    def record(self) -> Record:
        head = (self.heading_field,) if self.heading_field else ()
        rows = tuple((text_field(_THING, name), number_field(_PRICE, price)) for name, price in self.goods)
        fields = (*head, *(entry.field for entry in (*self.entries, *self.after)))
        return Record(self.noun, fields, rows, ("items", "products", "lines"), len(head) + len(self.entries))


_NUMBER = ("number", "code", "reference", "id")
_THING, _PRICE = ("item", "name", "product"), ("price", "cost", "amount")


class PageScene:
    skills: tuple[str, ...] = ("document", "document", "document", "extract")

    def __init__(self, rng: Random, sheet: Sheet, smallest: int = SMALLEST_PRINT) -> None:
        name = rng.choice(font_names())
        size = rng.randint(smallest, max(smallest, min(_LARGEST, sheet.drawn[1] // 12)))
        room = (sheet.drawn[1] - 2 * _MARGIN) // (size + 4)  # lines
        make = rng.choice((_receipt, _receipt, _form, _form, _letter))
        face = font(name, size)
        self.page = _fitting(make(rng, max(3, room)), face, sheet.drawn[0] - 2 * _MARGIN)
        self.pictures: tuple[Picture, ...] = (self._drawn(rng, sheet, face, font(name, size + rng.randint(1, 6))),)

    def ask(self, rng: Random, skill: str) -> Question | None:
        return ask_page(rng, self.page, skill)

    def record(self) -> Record:
        return self.page.record()

    def _drawn(self, rng: Random, sheet: Sheet, face: Font, large: Font) -> Picture:
        paper, color = _paper(rng)
        canvas = Canvas(sheet.size, sheet.drawn, paper)
        lines = self.page.lines()
        wide = canvas.width - 2 * _MARGIN
        if self.page.heading and _width(large, self.page.heading) > wide:
            large = face
        least = sum(face.getmetrics())
        step = min(int(least * rng.uniform(1.0, 1.7)), (canvas.height - 2 * _MARGIN) // (len(lines) + 1))
        spare = canvas.height - 2 * _MARGIN - step * len(lines) - sum(large.getmetrics()) + step
        y = _MARGIN + rng.randint(0, max(0, spare // 2))
        style = rng.random()  # of entries
        middle = max((_width(face, line.left) for line in lines if line.right), default=0) + face.size * 0.8
        rest = max((_width(face, line.right) for line in lines), default=0)
        for line in lines:
            if line.is_heading:
                left = (wide - _width(large, line.left)) * rng.choice((0.0, 0.5))
                canvas.text((_MARGIN + int(left), y), line.left, large, color)
                y += max(step, sum(large.getmetrics()))
                continue
            canvas.text((_MARGIN, y), line.left + (":" if line.right and style < 0.4 else ""), face, color)
            if line.right:
                x = middle if style < 0.7 and middle + rest <= wide else wide - _width(face, line.right)
                canvas.text((_MARGIN + int(x), y), line.right, face, color, beside=line.left)
            y += step
        return canvas.finish(rng)


def _fitting(page: Page, face: Font, wide: float) -> Page:
    """The page without what is too wide for it."""

    def fits(left: str, right: str = "") -> bool:
        return _width(face, left) + _width(face, right) + face.size * 1.2 <= wide

    return replace(
        page,
        heading=page.heading if fits(page.heading) else "",
        heading_field=page.heading_field if fits(page.heading) else None,
        entries=tuple(e for e in page.entries if fits(e.label, e.text)),
        goods=tuple(one for one in page.goods if fits(*one)),
        after=tuple(e for e in page.after if fits(e.label, e.text)),
        body=tuple(text for text in page.body if fits(text)),
    )


def _width(face: Font, text: str) -> float:
    return sum(advance(face, char) for char in text)


def _paper(rng: Random) -> tuple[Rgb, Rgb]:
    """Mostly dark print on light paper."""
    if rng.random() < 0.25:
        paper, _ = background(rng, [])
        return paper, ink(rng, paper)[0]
    light = rng.randint(215, 255)
    dark = rng.choice((COLORS["black"], (rng.randint(0, 70), rng.randint(0, 70), rng.randint(0, 110))))
    return (light, light, max(200, light - rng.randint(0, 25))), dark


# --- what is written ----------------------------------------------------------------------------------------------


def _receipt(rng: Random, room: int) -> Page:
    shop, style = _name(rng, TOWNS), rng.random()
    if style < 0.45:
        shop = f"{shop} {rng.choice(('Shop', 'Market', 'Store', 'Cafe', 'Bakery'))}"
    elif style < 0.6:
        shop = f"{rng.choice(('Cafe', 'Bar', 'Hotel', 'Casa', 'Mini'))} {shop}"
    count = max(1, min(rng.randint(1, 5), room - 4))
    most = 2999 if rng.random() < 0.85 else 199999
    cents = [rng.randint(10, most) for _ in range(count)]
    goods = tuple((thing, _money(value)) for thing, value in zip(_goods(rng, count), cents, strict=True))
    before = [_entry(rng, kind) for kind in rng.sample(("date", "time", "number"), rng.randint(0, 2))]
    total = rng.choice(("Total", "Total", "TOTAL", "Sum", "Amount"))
    after = [
        Entry(total, _money(sum(cents)), number_field(("total", "total_price", "sum", "amount"), _money(sum(cents))))
    ]
    if rng.random() < 0.3:
        after.append(_entry(rng, "paid"))
    spare = max(0, room - count - 2)
    heading_field = text_field(("shop", "store", "merchant", "vendor"), shop)
    return Page("receipt", shop, heading_field, tuple(before[:spare]), goods, tuple(after))


_LABEL_WORDS = ("total", "sum", "amount", "date", "day", "time", "hour", "number", "paid", "price", "item")


def _goods(rng: Random, count: int) -> list[str]:
    """Different things, now and then ones that are sold nowhere."""
    if rng.random() < 0.6:
        return rng.sample(GOODS, count)
    found: list[str] = []
    while len(found) < count:
        thing = _name(rng, GOODS)
        if thing.lower() not in (*(name.lower() for name in found), *_LABEL_WORDS):
            found.append(thing)
    return found


def _form(rng: Random, room: int) -> Page:
    noun = rng.choice(("form", "form", "card", "ticket", "invoice", "order"))
    kinds = rng.sample(tuple(_ENTRIES), min(rng.randint(3, 8), room - 1))
    number = "" if "number" in kinds else str(rng.randint(1, 999))  # one number is enough
    numbered = f"{noun.capitalize()} {number}".strip()
    heading = rng.choice((noun.capitalize(), noun.upper(), numbered, ""))
    field = text_field(_NUMBER, number) if number and heading == numbered else None
    return Page(noun, heading, field, entries=tuple(_entry(rng, kind) for kind in kinds))


def _letter(rng: Random, room: int) -> Page:
    title = " ".join(rng.choice(COMMON).capitalize() for _ in range(rng.randint(1, 2)))
    kinds = rng.sample(("from", "to", "date", "number", "city"), min(rng.randint(1, 4), max(1, room - 3)))
    count = max(1, min(room - 2 - len(kinds), rng.randint(1, 20)))
    body = tuple(" ".join(rng.choices(COMMON, k=rng.randint(2, 4))) for _ in range(count))
    field = text_field(("title", "heading", "subject"), title)
    return Page(
        rng.choice(("letter", "page", "document")), title, field, tuple(_entry(rng, k) for k in kinds), body=body
    )


def _entry(rng: Random, kind: str) -> Entry:
    label, make = _ENTRIES[kind]
    text, field = make(rng)
    shown = label.upper() if rng.random() < 0.08 else label
    return Entry(shown, text, field)


Made = tuple[str, Field]


def _named(names: tuple[str, ...], some: tuple[str, ...]) -> Callable[[Random], Made]:
    def make(rng: Random) -> Made:
        text = _name(rng, some)
        if some is PEOPLE and rng.random() < 0.3:
            text = f"{text} {word(rng, 7, 3).capitalize()}"
        return text, text_field(names, text)

    return make


def _whole(names: tuple[str, ...], most: int) -> Callable[[Random], Made]:
    def make(rng: Random) -> Made:
        text = str(rng.randint(1, rng.choice((9, most))))
        return text, number_field(names, text)

    return make


def _yes(names: tuple[str, ...]) -> Callable[[Random], Made]:
    def make(rng: Random) -> Made:
        is_so = rng.random() < 0.5
        pair = rng.choice((("yes", "no"), ("Yes", "No"), ("[x]", "[ ]")))
        return pair[0 if is_so else 1], yes_field(names, is_so)

    return make


def _date(rng: Random) -> Made:
    year, month, day = rng.randint(1990, 2039), rng.randint(1, 12), rng.randint(1, 28)
    text = f"{year}-{month:02}-{day:02}" if rng.random() < 0.7 else f"{day:02}.{month:02}.{year}"
    return text, text_field(("date", "day"), text)


def _time(rng: Random) -> Made:
    text = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return text, text_field(("time", "hour"), text)


def _code(rng: Random) -> Made:
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 2)))
    if rng.random() < 0.25:
        letters = rng.choice(("INV", "ORD", "REF", "PO", "NR"))
    text = letters + rng.choice(("", "-")) + "".join(rng.choices(string.digits, k=rng.randint(2, 4)))
    return text, text_field(_NUMBER, text)


def _phone(rng: Random) -> Made:
    text = f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    return text, text_field(("phone", "telephone", "phone_number"), text)


def _amount(rng: Random) -> Made:
    text = _money(rng.randint(10, rng.choice((99999, 99999, 999999))))
    return text, number_field(("amount", "sum", "price"), text)


_ENTRIES: dict[str, tuple[str, Callable[[Random], Made]]] = {
    "name": ("Name", _named(("name", "full_name", "customer"), PEOPLE)),
    "from": ("From", _named(("from", "sender", "author"), PEOPLE)),
    "to": ("To", _named(("to", "recipient", "receiver"), PEOPLE)),
    "city": ("City", _named(("city", "town", "place"), TOWNS)),
    "product": ("Item", _named(("item", "product"), GOODS)),
    "age": ("Age", _whole(("age", "years"), 99)),
    "room": ("Room", _whole(("room", "room_number"), 499)),
    "count": ("Quantity", _whole(("quantity", "count"), 99)),
    "date": ("Date", _date),
    "time": ("Time", _time),
    "number": ("No", _code),
    "phone": ("Phone", _phone),
    "amount": ("Amount", _amount),
    "member": ("Member", _yes(("member", "is_member"))),
    "paid": ("Paid", _yes(("paid", "is_paid"))),
}


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"


def _name(rng: Random, known: tuple[str, ...]) -> str:
    """A known name, or one that must be read letter by letter."""
    return rng.choice(known) if rng.random() < 0.5 else word(rng, 8, 3).capitalize()
