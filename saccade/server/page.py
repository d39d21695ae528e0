"""The page at `/`: files that browsers load, read once at the start. Knows nothing of models, engines or keys."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response

STATIC = "/static/"
_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Everything from here and nothing inline. Pictures that people drop are blobs until they are sent as data URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",  # a newer server's page must not meet an older one's scripts
}


def page_file(name: str) -> Response:
    """One of the page's files; a 404 for every other name."""
    content = _files().get(name)
    if content is None:
        raise HTTPException(404)
    return Response(content, 200, _HEADERS, media_type=_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """All there are, by name: what a client asks for is looked up here and never in the file system."""
    return {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
