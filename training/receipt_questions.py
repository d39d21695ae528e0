"""How people ask about a receipt, a form or a letter: without naming the field, or naming nothing else."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

from saccade.apps.evaluation.scoring import OTHER_NUMBER, OTHER_QUOTE
from training.records import spoken
from training.samples import Question
from training.shape_questions import DESCRIBE, a
from training.sheet import listed
from training.words import COMMON, GOODS

if TYPE_CHECKING:
    from training.pages import Entry, Page

_WAYS = {  # by the usual name of a field; each must fit no other field of a page
    "total": ("How much did I pay?", "How much was it?", "What did it cost?", "How much did I spend?"),
    "date": ("When was this?", "When was it?", "What day was it?", "Which day is it from?"),
    "time": ("At what time?", "What time was it?", "At what time was it?"),
    "name": ("Who is it?", "Who is this?", "What is the person called?"),
    "city": ("Which city is it?", "What city is it?", "In which city?"),
    "phone": ("What number can I call?", "How can I call them?", "Which phone number is given?"),
    "amount": ("How much is it?", "How much money is it?", "How much do I pay?"),
    "from": ("Who sent this?", "Who wrote this?", "Who is it from?"),
    "to": ("Who is it for?", "Who gets this?", "To whom is it?"),
    "age": ("How old?", "How old is the person?"),
    "room": ("Which room?", "Which room is it?"),
    "quantity": ("How many?", "How many are there?"),
    "item": ("Which product is it?", "Which item is it?"),
    "number": ("Under which number?", "Which reference does it have?"),
    "paid": ("Is it paid?", "Has it been paid?", "Was it paid?", "Did they pay?"),
    "member": ("Is the person a member?", "Are they a member?"),
}
_PEOPLE = ("name", "from", "to")
_SHOP = ("Where did I buy this?", "Where was this bought?", "Where is this from?", "Which store is this?", "Shop?")
_ITEMS = ("What did I buy?", "What was bought?", "List the items.", "Which items are there?", "Read the items.")
_COUNT = ("How many items did I buy?", "How many things did I buy?", "How many products are there?")
_KIND = ("What is this?", "What kind of document is this?", "What kind of picture is this?", "What is it?")
_MOST_ITEMS = 40  # letters of a list of items


def ask_naturally(rng: Random, page: Page) -> Question | None:
    kinds = [_entry] * 2 * bool(page.entries or page.after) + [_goods] * 3 * bool(page.goods)
    kinds += [_shop] * (page.noun == "receipt" and bool(page.heading))
    return rng.choice(kinds)(rng, page) if kinds else None


def caption(rng: Random, page: Page) -> Question | None:
    """What can be told from the picture: a form without a heading is a form, and all plain text is a letter."""
    text = rng.choice(_KIND if rng.random() < 0.6 else DESCRIBE)
    if page.body:
        kind, named = "letter", " with the heading {}"
    elif page.goods and page.after:
        kind, named = "receipt", " of {}"
    elif page.entries and page.noun != "receipt":
        kind, named = page.noun if page.heading else "form", ""
    else:
        return None
    said = page.heading if named else ""
    more = named.format(json.dumps(said)) if said else ""
    keys = (kind, said) if said else (kind,)
    return Question("document", text, f"The picture shows {a(kind)}{more}.", keys, (OTHER_QUOTE,) if said else ())


def _entry(rng: Random, page: Page) -> Question | None:
    entries = (*page.entries, *page.after)
    entry = rng.choice(entries)
    name = entry.field.names[0]
    noun = spoken(name)
    if rng.random() < 0.4 or name not in _WAYS:
        text = rng.choice((f"{noun.capitalize()}?", f"The {noun}, please.", f"{noun.capitalize()}, please."))
        return _answered(text, noun, entry)
    if name == "name" and sum(other.field.names[0] in _PEOPLE for other in entries) > 1:
        return None
    return _answered(rng.choice(_WAYS[name]), noun, entry)


def _answered(text: str, noun: str, entry: Entry) -> Question:
    if entry.field.kind == "boolean":
        right, wrong = ("yes", "no") if entry.field.value == "true" else ("no", "yes")
        return Question("document", text, f"The entry for {noun} is {right}.", (right,), (wrong,))
    if entry.text[0].isdigit():
        wrong_too = (OTHER_NUMBER,) if entry.text.isdigit() else ()
        return Question("document", text, f"The {noun} is {entry.text}.", (entry.text,), wrong_too)
    return Question("document", text, f"The {noun} is {json.dumps(entry.text)}.", (entry.text,), (OTHER_QUOTE,))


def _shop(rng: Random, page: Page) -> Question:
    answer = f"The shop is {json.dumps(page.heading)}."
    return Question("document", rng.choice(_SHOP), answer, (page.heading,), (OTHER_QUOTE,))


def _goods(rng: Random, page: Page) -> Question | None:
    return rng.choice((_items, _items, _dearest, _dearest, _is_bought, _is_bought, _count))(rng, page)


def _items(rng: Random, page: Page) -> Question | None:
    names = [thing for thing, _ in page.goods]
    if sum(map(len, names)) > _MOST_ITEMS:
        return None
    verb = "items are" if len(names) > 1 else "item is"
    said = listed([json.dumps(name) for name in names])
    return Question("document", rng.choice(_ITEMS), f"The {verb} {said}.", tuple(names), (OTHER_QUOTE,))


def _dearest(rng: Random, page: Page) -> Question | None:
    if len(page.goods) < 2:
        return None
    ordered = sorted(page.goods, key=lambda one: float(one[1]), reverse=rng.random() < 0.6)
    first, second = ordered[0], ordered[1]
    if float(first[1]) == float(second[1]):
        return None
    is_dear = float(first[1]) > float(second[1])
    word, most = ("most expensive", "most") if is_dear else ("cheapest", "least")
    text = rng.choice((f"What is the {word} item?", f"Which item is the {word}?", f"Which item costs the {most}?"))
    wrong = tuple(other for other, _ in page.goods if other != first[0])
    return Question("document", text, f"The {word} item is {json.dumps(first[0])}.", (first[0],), wrong)


def _is_bought(rng: Random, page: Page) -> Question:
    names = [thing for thing, _ in page.goods]
    is_there = rng.random() < 0.5
    known = {name.lower() for name in names}
    missing = [name for name in (*GOODS, *rng.sample(COMMON, 9)) if name.lower() not in known]
    thing = (rng.choice(names) if is_there else rng.choice(missing)).lower()
    text = rng.choice((f"Is there {thing} on the receipt?", f"Did I buy {thing}?", f"Is {thing} on the receipt?"))
    if is_there:
        return Question("document", text, f"Yes, there is {thing}.", ("yes",), ("no", "not"))
    return Question("document", text, f"No, there is no {thing}.", ("no",), ("yes",))


def _count(rng: Random, page: Page) -> Question:
    count = str(len(page.goods))
    said = "There is 1 item." if count == "1" else f"There are {count} items."
    return Question("document", rng.choice(_COUNT), said, (count,), (OTHER_NUMBER,))
