"""GET /: a page for people who open the server in a browser. Names the routes and shows the engine's numbers."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from saccade import __version__
from saccade.server.service import Service

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>Saccade</title>
<style>body{{font:16px/1.5 system-ui;max-width:46rem;margin:3rem auto;padding:0 1rem}}pre{{overflow:auto}}</style>
</head><body><h1>Saccade {version}</h1><p>{model}: the engine is {state}.</p>
<h2>Routes</h2><ul>{routes}</ul><h2>Now</h2><pre>{stats}</pre></body></html>
"""


def page(service: Service, routes: Sequence[str]) -> str:
    return _PAGE.format(
        version=__version__,
        model=html.escape(service.names[0]),
        state=service.engine.status().state,
        routes="".join(f"<li><code>{html.escape(route)}</code></li>" for route in sorted(set(routes))),
        stats=html.escape(json.dumps(service.engine.stats(), indent=2)),
    )
