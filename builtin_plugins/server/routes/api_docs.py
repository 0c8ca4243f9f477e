"""`/docs`: Swagger UI on `/openapi.json`, from files of this package."""

from __future__ import annotations

import gzip
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from hardpoint.plugins.server import Route

from .page import PageFile

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The policy of the chat page without trusted types, which Swagger UI does not support."""


class _CompressedFile(PageFile):
    """A file of the page that is sent as it is stored: compressed with gzip."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(name, content, policy=_POLICY)
        self._plain: bytes | None = None

    async def answer(self, request: Request) -> Response:
        """Answer with the file, or that the browser has it."""
        response = await super().answer(request)
        response.headers["vary"] = "accept-encoding"
        if not response.body:
            return response
        if "gzip" in request.headers.get("accept-encoding", ""):
            response.headers["content-encoding"] = "gzip"
            return response
        if self._plain is None:
            self._plain = gzip.decompress(bytes(response.body))
        headers = dict(response.headers)
        del headers["content-length"], headers["content-type"]
        return Response(self._plain, headers=headers, media_type=response.media_type)


def api_docs_routes() -> list[Route]:
    """Return the routes of the page and its files."""
    folder = files("hardpoint.builtin_plugins.server") / "api_docs"
    page = PageFile("docs.html", (folder / "docs.html").read_bytes(), policy=_POLICY)
    summary = "A page that describes the routes and sends requests to them."
    routes = [Route(path="/docs", endpoint=page.answer, summary=summary, is_counted=False)]
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".gz")
        if not name.endswith((".js", ".css")):
            continue
        content = file.read_bytes()
        if name == file.name:
            part = PageFile(name, content, policy=_POLICY)
        else:
            part = _CompressedFile(name, content)
        routes.append(
            Route(
                path=f"/docs/{name}",
                endpoint=part.answer,
                summary="A file of that page.",
                is_counted=False,
            )
        )
    return routes
