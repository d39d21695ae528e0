"""Names that people give to the fields of a picture in JSON, and names of fields that a picture has not."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from training.records import Field, Record

_SHOP = ("shop_name", "store_name", "merchant_name", "vendor_name", "seller", "supplier", "company", "business_name")
_TOTAL = ("total_amount", "grand_total", "amount_due", "total_due", "total_cost", "total_sum")
_CUSTOMER = ("customer_name", "client", "client_name")
_PARTIES = ("invoice", "order")  # their From is who sells, their To is who buys

# By the usual name of a field; `{noun}` is what the picture is.
_FIELDS: dict[str, tuple[str, ...]] = {
    "shop": _SHOP,
    "total": _TOTAL,
    "date": ("{noun}_date", "date_of_{noun}"),
    "time": ("{noun}_time",),
    "number": ("{noun}_number", "{noun}_no", "{noun}_id", "reference_number"),
    "name": ("customer_name", "person"),
    "from": ("sender_name", "from_name"),
    "to": ("recipient_name", "to_name", "addressee"),
    "city": ("location",),
    "item": ("item_name", "product_name", "article", "description"),
    "quantity": ("qty", "units"),
    "amount": _TOTAL,
    "phone": ("tel", "phone_no", "contact_number"),
    "room": ("room_no",),
    "title": ("headline",),
    "count": ("shape_count", "num_shapes", "number_of_objects", "total_shapes"),
}
_OF_PARTIES = {"from": ("vendor", *_SHOP), "to": ("customer", *_CUSTOMER, "bill_to"), "name": _CUSTOMER}
_OF_RECEIPTS = {"date": ("purchase_date", "transaction_date"), "number": ("transaction_id",)}
_ROW_FIELDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("receipt", "item"): ("item_name", "product_name", "description", "article", "title"),
    ("receipt", "price"): ("unit_price", "item_price", "total", "value"),
    ("chart", "label"): ("category", "title", "x", "text"),
    ("chart", "value"): ("y", "amount", "number", "count"),
    ("picture", "shape"): ("type", "form", "figure", "name"),
    ("table", "name"): ("row_name", "row_label", "title"),
}
_ROWS: dict[str, tuple[str, ...]] = {
    "receipt": ("line_items", "goods", "purchases", "articles", "entries"),
    "chart": ("items", "entries", "points", "chart"),
    "picture": ("items", "figures", "elements"),
    "table": ("items", "entries", "records", "lines"),
}
_PLURALS = {"quantity": "quantities", "city": "cities"}


class Absent(NamedTuple):
    """A field that people ask for and that may not be there."""

    name: str
    kind: str = "string"
    unless: tuple[str, ...] = ()  # usual names of fields, or kinds of picture, which make it a matter of opinion


_DATA = ("chart", "table", "picture")
_PROSE = ("letter", "page", "document")
_ABSENT = (
    *(Absent(name) for name in ("email", "website", "currency", "gender", "payment_method")),
    *(Absent(name) for name in ("date", "time", "phone", "phone_number")),
    *(Absent(name, unless=_PROSE) for name in ("notes", "comment")),
    *(Absent(name, unless=("shop",)) for name in ("brand", "logo")),
    *(Absent(name, unless=("date",)) for name in ("due_date", "birthday", "invoice_date")),
    *(Absent(name, unless=("number", "room")) for name in ("invoice_number", "order_number", "customer_id", "barcode")),
    *(Absent(name, unless=("city", "shop", *_DATA)) for name in ("address", "country", "city", "state")),
    *(Absent(name, unless=("from", "to", *_DATA)) for name in ("shop", "store_name", "merchant", "vendor")),
    *(Absent(name, unless=("name", "to", "from", "chart", "table")) for name in ("customer_name", "customer", "buyer")),
    *(Absent(name, unless=("name", "to", "from")) for name in ("company", "cashier")),
    Absent("category", unless=_DATA),
    Absent("status", unless=("paid", "member", *_DATA)),
    *(Absent(name, "number") for name in ("tax", "tip", "discount", "vat", "weight")),
    *(Absent(name, "number", ("amount", "quantity", "shop", *_DATA)) for name in ("total", "price", "total_amount")),
    *(Absent(name, "integer", ("room", *_DATA)) for name in ("age", "floor")),
)
_ABSENT_IN_ROWS = (
    *(Absent(name) for name in ("currency", "note", "brand", "sku")),
    Absent("category", unless=_DATA),
    *(Absent(name, "integer", _DATA) for name in ("quantity", "qty")),
    *(Absent(name, "number") for name in ("tax", "discount", "weight")),
)


def field_names(record: Record) -> list[tuple[str, ...]]:
    """The keys each field may have, the usual one first; none that could mean two of them."""
    usual = {field.names[0] for field in record.fields}
    return _unshared([(*field.names, *_more(record.noun, field, usual)) for field in record.fields])


def row_field_names(record: Record) -> list[tuple[str, ...]]:
    """The same for the fields of a row."""
    row = record.rows[0] if record.rows else ()
    return _unshared([(*field.names, *_ROW_FIELDS.get((record.noun, field.names[0]), ())) for field in row])


def rows_keys(record: Record) -> tuple[str, ...]:
    return (*record.rows_names, *_ROWS.get(record.noun, ()))


def absent(record: Record) -> list[Absent]:
    """Fields that this picture surely has not."""
    return _without(record, _ABSENT)


def absent_in_rows(record: Record) -> list[Absent]:
    return _without(record, _ABSENT_IN_ROWS)


def plural(name: str) -> str:
    return _PLURALS.get(name) or (name if name.endswith("s") else f"{name}s")


def _more(noun: str, field: Field, usual: set[str]) -> tuple[str, ...]:
    name = field.names[0]
    if name == "amount" and "quantity" in usual:  # of one, or of all?
        return ()
    if name == "name" and usual & {"from", "to"}:  # which of them is the customer?
        return ()
    own = (_OF_PARTIES if noun in _PARTIES else _OF_RECEIPTS if noun == "receipt" else {}).get(name, ())
    return tuple(more.format(noun=noun) for more in (*_FIELDS.get(name, ()), *own) if noun != "page" or "{" not in more)


def _unshared(names: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    counts = Counter(name for some in names for name in set(some))
    return [(some[0], *(name for name in dict.fromkeys(some[1:]) if counts[name] == 1)) for some in names]


def _without(record: Record, some: tuple[Absent, ...]) -> list[Absent]:
    taken = {name.lower() for names in (*field_names(record), *row_field_names(record)) for name in names}
    taken |= {key.lower() for key in rows_keys(record)}
    there = {record.noun, *(field.names[0] for field in record.fields)}
    return [one for one in some if one.name not in taken and not there & set(one.unless)]
