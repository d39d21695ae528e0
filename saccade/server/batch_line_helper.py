"""The helper process of a server that reads batch files: `python -m saccade.server.batch_line_helper CHARS`.

It refuses a body that is larger than any request of this model needs.
"""

from __future__ import annotations

import sys

from saccade.apps.batch.line_helper import serve_lines
from saccade.server.errors import ApiError
from saccade.server.http.text_limit import TextTally

_CHUNK = 1 << 16  # as bodies arrive from a socket


def problem_of(body: bytes, max_chars: int) -> str | None:
    tally = TextTally(max_chars)
    try:
        for start in range(0, len(body), _CHUNK):
            tally.take(body[start : start + _CHUNK])
    except ApiError as error:
        return error.message
    return None


if __name__ == "__main__":
    chars = int(sys.argv[1])
    serve_lines(lambda body: problem_of(body, chars))
