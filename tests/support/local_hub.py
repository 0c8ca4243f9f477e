"""A small Hugging Face hub on a port of this machine: models of files that a test gives."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "a" * 40
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/[^/]+")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")


class LocalHub:
    """The hub.

    Attributes:
        models: content of files, by the repository and the path.
        stated: content whose size and SHA-256 are stated, if it differs from what is sent.
        sent: paths of the files that were downloaded, in their order.
        cut: path of files whose next download ends in the middle of it.
    """

    def __init__(self, models: Mapping[str, Mapping[str, bytes]]) -> None:
        self.models = models
        self.stated: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.cut: set[str] = set()
        self.url = ""

    def describe(self, repo: str) -> bytes:
        siblings = []
        for path, content in self.models[repo].items():
            stated = self.stated.get(path, content)
            sha256 = hashlib.sha256(stated).hexdigest()
            lfs = {"sha256": sha256, "size": len(stated), "pointerSize": 130}
            file = {"rfilename": path, "size": len(stated), "blobId": "b" * 40}
            siblings.append(file if path.endswith(".json") else {**file, "lfs": lfs})
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": []}
        return json.dumps({**info, "downloads": 0, "siblings": siblings}).encode()

    def tree(self, repo: str) -> bytes:
        files = []
        for file in json.loads(self.describe(repo))["siblings"]:
            entry = {"type": "file", "path": file["rfilename"], "size": file["size"]}
            lfs = file.get("lfs")
            if lfs is not None:
                entry["lfs"] = {**lfs, "oid": lfs["sha256"]}
            files.append({**entry, "oid": file["blobId"]})
        return json.dumps(files).encode()

    def content(self, repo: str, path: str) -> tuple[bytes, str]:
        content = self.models[repo][path]
        stated = self.stated.get(path, content)
        return content, hashlib.sha256(stated).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path, hub = urlsplit(self.path).path, self.hub
        if (match := _API.fullmatch(path)) and match[1] in hub.models:
            self._send(200, hub.describe(match[1]), {"Content-Type": "application/json"}, has_body)
            return
        if (match := _TREE.fullmatch(path)) and match[1] in hub.models:
            self._send(200, hub.tree(match[1]), {"Content-Type": "application/json"}, has_body)
            return
        match = _FILE.fullmatch(path)
        if match is None or match[2] not in hub.models.get(match[1], ()):
            code = {"X-Error-Code": "EntryNotFound" if match else "RepoNotFound"}
            self._send(404, b"{}", code, has_body)
            return
        content, etag = hub.content(match[1], match[2])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range", ""))
        if start is not None:
            content = content[int(start[1]) :]
        if has_body:
            hub.sent.append(match[2])
        if has_body and match[2] in hub.cut:
            hub.cut.discard(match[2])
            self._send(500, b"", {}, has_body)
            return
        self._send(206 if start else 200, content, headers, has_body)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], has_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)


@contextlib.contextmanager
def local_hub(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[LocalHub]:
    """Serve models until the context ends."""
    hub = LocalHub(models)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
