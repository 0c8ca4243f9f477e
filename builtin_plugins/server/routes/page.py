"""The web page at `/`: the chat of the users' address, the live view of the admin address."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from hardpoint.plugins.server import Route

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no text of a model that becomes markup."""

_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again by its ETag
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

_NOT_MODIFIED = 304


class PageFile:
    """A file of the page, served from memory."""

    def __init__(self, name: str, content: bytes, policy: str = _POLICY) -> None:
        """Hold the content of a file.

        Args:
            name: name of the file; its end gives the type.
            content: bytes of the file.
            policy: content security policy.
        """
        self._content = content
        self._headers = {**_HEADERS, "content-security-policy": policy}
        self._type = _TYPES[name[name.rindex(".") :]]
        self._tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """Answer with the file, or that the browser has it."""
        headers = {**self._headers, "etag": self._tag}
        if _names(request.headers.get("if-none-match", ""), self._tag):
            return Response(status_code=_NOT_MODIFIED, headers=headers)
        return Response(self._content, headers=headers, media_type=self._type)


def _names(header: str, tag: str) -> bool:
    tags = [part.strip().removeprefix("W/") for part in header.split(",")]
    return tag in tags or "*" in tags


def page_routes() -> list[Route]:
    """Return the routes of the chat page."""
    return _routes("chat", "A page to chat with the model.", admin=False)


def live_routes() -> list[Route]:
    """Return the routes of the live view."""
    return _routes("live", "A page that shows the engine at work.", admin=True)


def with_page_files(open_routes: Collection[str], routes: Collection[Route]) -> frozenset[str]:
    """Return open routes; where `/` is one of them, with the files of the page there.

    Args:
        routes: what `page_routes` or `live_routes` returned; none without a page.
    """
    if "/" not in open_routes:
        return frozenset(open_routes)
    return frozenset([*open_routes, *(route.path for route in routes)])


def _routes(folder: str, summary: str, *, admin: bool) -> list[Route]:
    contents = _contents(folder)
    document = f"{folder}/{folder}.html"
    root = PageFile(document, contents.pop(document))
    return [
        Route(path="/", endpoint=root.answer, admin=admin, summary=summary, is_counted=False),
        *(
            Route(
                path=f"/page/{name}",
                endpoint=PageFile(name, content).answer,
                admin=admin,
                summary="A file of that page.",
                is_counted=False,
            )
            for name, content in sorted(contents.items())
        ),
    ]


def _contents(folder: str) -> dict[str, bytes]:
    page = files("hardpoint.builtin_plugins.server") / "page"
    return {
        f"{part}/{file.name}": file.read_bytes()
        for part in (folder, "shared")
        for file in (page / part).iterdir()
        if file.name.endswith(tuple(_TYPES))
    }
