"""The files of the page at `/`. Knows nothing of models, engines or keys."""

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
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".webm": "video/webm",
}
_HEADERS = {
    # Everything from this origin, nothing inline. A dropped image is a blob until it is sent as a data URL.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",  # a new page must not load old scripts after an upgrade
}


def page_file(name: str) -> Response:
    """A file of the page. HTTPException 404 for any other name."""
    content = _files().get(name)
    if content is None:
        raise HTTPException(404)
    return Response(content, 200, _HEADERS, media_type=_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """All files by name, read once: names from clients never reach the file system."""
    return {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
