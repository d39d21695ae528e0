"""Rows of blocks: the first token of those that a token sees, also after it."""

from __future__ import annotations

import numpy as np
import pytest

from saccade.checkpoint.token_blocks import Blocks, block_row

KINDS = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0])  # text, a picture, text, a picture, text


@pytest.mark.parametrize(
    ("blocks", "row"),
    [
        ("image", [0, 1, 2, 2, 4, 5, 5, 5, 8]),
        ("images", [0, 1, 2, 2, 4, 2, 2, 2, 8]),
        ("prompt", [0] * 9),
        ("before answer", [9] * 9),
    ],
)
def test_a_row_names_the_first_token_of_each_block(blocks: Blocks, row: list[int]) -> None:
    assert block_row(KINDS, blocks).tolist() == row


def test_text_alone_has_no_blocks() -> None:
    assert block_row(np.zeros(3, np.int64), "image").tolist() == [0, 1, 2]
