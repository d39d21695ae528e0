"""The form of an entry: what safetensors reads, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from saccade.runner.embedding_tiers import entry
from saccade.runner.embedding_tiers.entry import EntryForm, Namespace, checksum
from saccade.types.media import Size
from tests.helpers.engine.tiers import WIDTH, embedding, item

NAME = "ab" * 32
FORM = EntryForm(4, WIDTH, "float32")


def bytes_of(form: EntryForm, *parts: memoryview) -> bytes:
    return b"".join([form.header(NAME, checksum(parts)), *parts])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_entry_is_a_safetensors_file(dtype: str) -> None:
    made = embedding(4).to(getattr(torch, dtype))
    coordinates = np.arange(8).reshape(2, 4)
    form = EntryForm(4, WIDTH, dtype, cells=Size(8, 8))
    data = bytes_of(form, coordinates.data.cast("B"), made.view(torch.uint8).flatten().numpy().data)
    assert len(data) == form.size
    found = load(data)
    assert torch.equal(found["embedding"], made) and found["embedding"].dtype == made.dtype
    assert found["coordinates"].tolist() == coordinates.tolist()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(bytes_of(FORM, embedding(4).view(torch.uint8).flatten().numpy().data))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    split = FORM.header_bytes
    assert not FORM.is_valid(bytes(whole[:split]), NAME, [memoryview(bytes(whole[split:]))])


def test_another_name_slots_width_or_dtype_is_noticed() -> None:
    payload = memoryview(bytes(FORM.embedding_bytes))
    header = FORM.header(NAME, checksum([payload]))
    assert FORM.is_valid(header, NAME, [payload])
    assert not FORM.is_valid(header, "cd" * 32, [payload])
    for other in (EntryForm(2, 2 * WIDTH, "float32"), EntryForm(8, WIDTH, "bfloat16")):
        assert other.embedding_bytes == FORM.embedding_bytes
        assert not other.is_valid(header, NAME, [payload])


def test_coordinates_outside_the_frame_are_refused() -> None:
    form = EntryForm(2, WIDTH, "float32", cells=Size(width=3, height=2))
    assert form.fits(np.array([[0, 1], [2, 2]]))
    assert not form.fits(np.array([[0, 2], [2, 2]]))
    assert not form.fits(np.array([[0, 1], [2, 3]]))
    assert not form.fits(np.array([[0, -1], [2, 2]]))


def test_a_name_holds_the_weights_the_dtype_the_key_and_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    key = item().key
    names = [
        Namespace(WIDTH, "float32", b"w").name(key),
        Namespace(WIDTH, "bfloat16", b"w").name(key),
        Namespace(WIDTH, "float32", b"v").name(key),
        Namespace(WIDTH, "float32", b"w").name(item().key),
    ]
    monkeypatch.setattr(entry, "EPOCH", entry.EPOCH + 1)
    names.append(Namespace(WIDTH, "float32", b"w").name(key))
    assert len(set(names)) == 5
    assert all(len(name) == 64 and set(name) <= set("0123456789abcdef") for name in names)
