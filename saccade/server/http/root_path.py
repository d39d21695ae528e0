"""A path before all routes, for a proxy that gives the server only a part of a site. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True)
class RootPath:
    """Removes the prefix that some proxies leave on. Requests without it stay as they are."""

    app: ASGIApp
    root: str  # such as /vlm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self.root:  # the page's links are relative to the slash
            await RedirectResponse(f"{self.root}/")(scope, receive, send)
        elif path.startswith(f"{self.root}/"):
            await self.app({**scope, "path": path.removeprefix(self.root)}, receive, send)
        else:
            await self.app(scope, receive, send)
