"""Sources of Anthropic's blocks: data, URLs and stored files."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.server.request.messages import _source


def test_a_source_is_what_its_type_says() -> None:
    url = {"type": "url", "url": "http://a/x.png", "data": "no"}
    assert _source(url, "messages[0]", "image", "url") == {"url": "http://a/x.png"}


@pytest.mark.parametrize("source", [{"type": "bogus", "": "http://a/x.png"}, {"type": ["url"]}, {"url": "x"}, 5, None])
def test_a_source_of_no_known_type_is_refused(source: Any) -> None:
    with pytest.raises(RequestError, match="the image's source must be"):
        _source(source, "messages[0]", "image", "url")
