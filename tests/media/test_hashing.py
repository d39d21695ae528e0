"""Keys tell pictures apart; records tell positions apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.media.hashing import RecentKeys, content_key, identity, salt_of
from saccade.media.load import Loaded, load_image
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Header, Key, Size
from saccade.types.prompt import RECORD_BYTES, Span
from tests.helpers.media.images import make_photo, png

POLICY = MediaPolicy.of(Options(max_image_bytes=1 << 20, max_image_pixels=1_000_000))


def bare(width: int, height: int, data: bytes) -> Loaded:
    return Loaded(data, Header("rgb", Size(width, height), 1, 1, "RGB"))


def key(loaded: Loaded, tag: bytes = b"tag", fingerprint: bytes = b"model", salt: bytes = b"") -> Key:
    return content_key(loaded, tag, fingerprint, salt)


def test_a_key_is_32_bytes_and_repeatable() -> None:
    loaded = load_image(png(make_photo()), POLICY)
    assert len(key(loaded)) == 32
    assert key(loaded) == key(load_image(png(make_photo()), POLICY))


def test_bytes_policy_model_and_salt_each_change_the_key() -> None:
    loaded = load_image(png(make_photo(seed=1)), POLICY)
    keys = {
        key(loaded),
        key(load_image(png(make_photo(seed=2)), POLICY)),
        key(loaded, tag=b"other"),
        key(loaded, fingerprint=b"other"),
        key(loaded, salt=b"other"),
    }
    assert len(keys) == 5


def test_equal_pixels_in_another_shape_have_another_key() -> None:
    data = bytes(6 * 3)
    assert len({key(bare(2, 3, data)), key(bare(3, 2, data)), key(bare(6, 1, data))}) == 3


def test_bytes_cannot_move_from_one_field_to_the_next() -> None:
    loaded = bare(1, 1, b"abc")
    assert key(loaded, b"ab", b"c") != key(loaded, b"a", b"bc")
    assert key(loaded, fingerprint=b"m", salt=b"s") != key(loaded, fingerprint=b"ms", salt=b"")


def test_a_file_and_its_pixels_are_different_images() -> None:
    photo = make_photo()
    assert key(load_image(png(photo), POLICY)) != key(load_image(photo, POLICY))


def test_a_transposed_image_has_another_key() -> None:
    photo = np.zeros((4, 4, 3), np.uint8)
    photo[0, 1] = 255
    assert key(load_image(photo, POLICY)) != key(load_image(photo.transpose(1, 0, 2), POLICY))


def test_a_text_record_is_zeros_and_the_token_id() -> None:
    assert identity([5, 1 << 40], ()) == bytes(32) + (5).to_bytes(8, "little") + bytes(32) + (1 << 40).to_bytes(
        8, "little"
    )


def test_a_image_record_is_the_key_and_the_offset() -> None:
    k = bytes(range(1, 33))
    records = identity([7, 9, 9, 9, 8], [Span(1, 3, k, 3)])
    cut = [records[i * RECORD_BYTES : (i + 1) * RECORD_BYTES] for i in range(5)]
    assert cut[0] == bytes(32) + (7).to_bytes(8, "little")
    assert cut[1:4] == [k + i.to_bytes(8, "little") for i in range(3)]
    assert cut[4] == bytes(32) + (8).to_bytes(8, "little")


def test_two_images_of_equal_size_have_different_records() -> None:
    first, second = (identity([9] * 4, [Span(0, 4, bytes([n]) * 32, 4)]) for n in (1, 2))
    assert first != second


def test_an_empty_prompt_has_no_records() -> None:
    assert identity([], ()) == b""


# --- keys that are remembered -------------------------------------------------------------------------------------


def plain(data: bytes, tag: bytes = b"tag", salt: bytes = b"") -> Key:
    return key(bare(2, 1, data), tag, b"model", salt)


def test_a_remembered_key_is_the_one_that_hashing_gives() -> None:
    recent, data = RecentKeys(b"model"), bytes(range(100))
    found = [recent.of(bare(2, 1, bytes(bytearray(data))), b"tag", b"") for _ in range(3)]
    assert found == [plain(data)] * 3


def test_the_same_bytes_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recent, data = RecentKeys(b"model"), bytes(range(100))
    first = recent.of(bare(2, 1, data), b"tag", b"")
    monkeypatch.setattr("saccade.media.hashing.content_key", None)
    assert recent.of(bare(2, 1, bytes(bytearray(data))), b"tag", b"") == first


def test_images_that_differ_in_one_byte_never_share_a_remembered_key() -> None:
    recent, data = RecentKeys(b"model"), bytes(1000)
    found = {recent.of(bare(2, 1, data[:i] + b"x" + data[i + 1 :]), b"tag", b"") for i in range(1000)}
    assert len(found) == 1000


def test_policy_salt_and_shape_are_part_of_what_is_remembered() -> None:
    recent, data = RecentKeys(b"model"), bytes(range(6))
    asked = [((2, 1), b"tag", b""), ((2, 1), b"other", b""), ((2, 1), b"tag", b"salt"), ((1, 2), b"tag", b"")]
    for _ in range(2):
        found = [recent.of(bare(*size, data), tag, salt) for size, tag, salt in asked]
        assert found == [key(bare(*size, data), tag, b"model", salt) for size, tag, salt in asked]


def test_the_oldest_images_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentKeys(b"model", max_bytes=250)
    images = [bytes([i]) * 100 for i in range(3)]
    for data in images:
        recent.of(bare(2, 1, data), b"tag", b"")
    hashed: list[bytes] = []
    monkeypatch.setattr("saccade.media.hashing.content_key", lambda loaded, *_: hashed.append(loaded.data))
    for data in (images[2], images[1], images[0]):
        recent.of(bare(2, 1, data), b"tag", b"")
    assert hashed == [images[0]]


def test_a_image_larger_than_the_memory_is_hashed_and_displaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recent, small = RecentKeys(b"model", max_bytes=250), b"small"
    first = recent.of(bare(2, 1, small), b"tag", b"")
    assert recent.of(bare(2, 1, bytes(300)), b"tag", b"") == plain(bytes(300))
    monkeypatch.setattr("saccade.media.hashing.content_key", None)
    assert recent.of(bare(2, 1, small), b"tag", b"") == first


@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 3)), max_size=60))
def test_whatever_comes_every_key_is_right_and_the_memory_stays_as_large(
    asked: list[tuple[int, int]],
) -> None:
    recent = RecentKeys(b"model", max_bytes=250)
    for length, byte in asked:
        data = bytes([byte]) * length
        assert recent.of(bare(2, 1, data), b"tag", b"") == plain(data)
        assert sum(lookup.length for lookup in recent._cached) <= 250 == len(recent._ring)


def test_no_more_images_are_remembered_than_allowed_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.media.hashing._CACHE_ENTRIES", 3)
    recent, hashed = RecentKeys(b"model"), list[bytes]()
    for i in range(9):
        recent.of(bare(2, 1, bytes([i])), b"tag", b"")
    assert len(recent._cached) == 3
    monkeypatch.setattr("saccade.media.hashing.content_key", lambda loaded, *_: hashed.append(loaded.data))
    for i in (8, 7, 6, 5):
        recent.of(bare(2, 1, bytes([i])), b"tag", b"")
    assert hashed == [bytes([5])]


def test_a_salt_however_long_is_not_kept() -> None:
    recent, salt = RecentKeys(b"model"), b"salt" * 1_000_000
    assert recent.of(bare(2, 1, b"picture"), b"tag", salt) == plain(b"picture", salt=salt)
    (lookup,) = recent._cached
    assert len(lookup.salt) == 32


# --- salts --------------------------------------------------------------------------------------------------------


def test_a_salt_is_nothing_or_a_digest_however_long_its_parts_are() -> None:
    assert salt_of("", "") == b""
    assert {len(salt_of(*parts)) for parts in (("a", ""), ("", "a"), ("a" * 10_000, "b" * 10_000_000))} == {32}


def test_salts_cannot_be_shifted_into_one_another() -> None:
    pairs = [
        ("a", "bc"),
        ("ab", "c"),
        ("", "abc"),
        ("abc", ""),
        ("", "1:abc"),
        ("1:a", "bc"),
        ("", "\ud800"),
        ("", "?"),
    ]
    assert len({salt_of(*pair) for pair in pairs}) == len(pairs)


def test_a_salt_that_is_no_string_is_refused() -> None:
    with pytest.raises(RequestError, match="not int") as caught:
        salt_of("tenant", 5)
    assert caught.value.param == "cache_salt"
