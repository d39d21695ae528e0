"""Questions about documents: their fields, the things on a receipt, and lines of plain text."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

from saccade.apps.evaluation.scoring import OTHER_NUMBER, OTHER_QUOTE
from training.extract import ask_json
from training.off_topic import off_topic
from training.receipt_questions import ask_naturally, caption
from training.records import spoken
from training.samples import Question

if TYPE_CHECKING:
    from training.pages import Entry, Page


def ask_page(rng: Random, page: Page, skill: str) -> Question | None:
    if skill == "extract":
        record = page.record()
        return ask_json(rng, record) if record.fields or record.rows else None
    kind = rng.random()
    if kind > 0.98:
        return off_topic(rng, "document")
    if kind < 0.34:
        return caption(rng, page) if kind < 0.09 else ask_naturally(rng, page)
    kinds = [_entry] * 4 * bool(page.entries or page.after) + [_good] * 3 * bool(page.goods)
    kinds += [_line] * 2 * bool(page.body) + [_heading] * bool(page.heading)
    return rng.choice(kinds)(rng, page) if kinds else None


def _entry(rng: Random, page: Page) -> Question:
    entry = rng.choice((*page.entries, *page.after))
    if entry.field.kind == "boolean":
        return _yes_or_no(rng, entry)
    noun = _noun(rng, entry)
    text = rng.choice(
        (
            f"What is the {noun}?",
            f"What is the {noun}?",
            f"Read the {noun}.",
            f"What is the {noun} on the {page.noun}?",
            f"What does the {page.noun} give as {noun}?",
            f"Find the {noun}.",
        )
    )
    return _said(text, f"The {noun} is {{}}.", entry.text)


def _noun(rng: Random, entry: Entry) -> str:
    name = entry.field.names[0] if rng.random() < 0.8 else rng.choice(entry.field.names)
    return spoken(name)


def _yes_or_no(rng: Random, entry: Entry) -> Question:
    noun, is_so = entry.field.names[0], entry.field.value == "true"
    text = rng.choice((f"Is it marked as {noun}?", f"Is {noun} yes or no?", f"What is the entry for {noun}?"))
    return _fixed(text, f"The entry for {noun} is {'yes' if is_so else 'no'}.", is_so)


def _fixed(text: str, answer: str, is_so: bool) -> Question:
    return Question("document", text, answer, ("yes",) if is_so else ("no",), ("no", "not") if is_so else ("yes",))


def _good(rng: Random, page: Page) -> Question | None:
    thing, price = rng.choice(page.goods)
    kind = rng.random()
    if kind < 0.6:
        text = rng.choice(
            (
                f"How much is {thing}?",
                f"What is the price of {thing}?",
                f"What does {thing} cost?",
                f"Read the price of {thing}.",
            )
        )
        return _said(text, f"The price of {thing} is {{}}.", price)
    if kind < 0.8:
        count = str(len(page.goods))
        text = rng.choice(("How many items are there?", "How many items are on the receipt?", "Count the items."))
        said = "There is 1 item." if count == "1" else f"There are {count} items."
        return Question("document", text, said, (count,), (OTHER_NUMBER,))
    if sum(price == other for _, other in page.goods) > 1:
        return None
    text = rng.choice((f"Which item costs {price}?", f"What costs {price}?"))
    wrong = tuple(other for other, _ in page.goods if other != thing)
    return Question("document", text, f"The item is {json.dumps(thing)}.", (thing,), wrong)


def _line(rng: Random, page: Page) -> Question:
    first, last = page.body[0], page.body[-1]
    place, line = rng.choice((("first", first), ("last", last)))
    if rng.random() < 0.4:
        text = rng.choice((f"What does the {place} line of the text say?", f"Read the {place} line of the text."))
        return _said(text, f"The {place} line says {{}}.", line)
    single = line.split()[0 if place == "first" else -1]
    text = rng.choice((f"What is the {place} word of the text?", f"Read the {place} word of the text."))
    return _said(text, f"The {place} word is {{}}.", single)


def _heading(rng: Random, page: Page) -> Question:
    if page.noun == "receipt":
        text = rng.choice(("What is the name of the shop?", "Which shop is it?", "What is the shop called?"))
        return _said(text, "The shop is {}.", page.heading)
    text = rng.choice(("What is the heading?", "What is the title?", f"What is the heading of the {page.noun}?"))
    return _said(text, "The heading is {}.", page.heading)


def _said(text: str, answer: str, said: str) -> Question:
    """Words are given in quotes, so that they are spelled; numbers as they are."""
    if said[0].isdigit():
        return Question("document", text, answer.format(said), (said,), (OTHER_NUMBER,) if said.isdigit() else ())
    return Question("document", text, answer.format(json.dumps(said)), (said,), (OTHER_QUOTE,))
