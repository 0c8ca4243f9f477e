"""A server in a thread of the test, and a plain client for it."""

import asyncio
import contextlib
import json
import socket
import threading

import httpx

from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.serving import Serving, bind


class RunningServer:
    """A server that answers at `url`.

    Attributes:
        engine: that it serves.
        service: of the server, for what no client sees.
        client: of httpx, with the URL as its base.
    """

    def __init__(self, engine, url, service, serving, loop):
        self.engine, self.url, self.service, self.serving = engine, url, service, serving
        self._loop = loop
        self.client = httpx.Client(base_url=url, timeout=30)
        self.port = int(url.rpartition(":")[2])

    def post(self, path, body, **kwargs):
        """Return the response to a JSON body."""
        return self.client.post(path, json=body, **kwargs)

    def events(self, path, body, **kwargs):
        """Return the decoded events of a stream, without the end marker, which it must have."""
        with self.client.stream("POST", path, json=body, **kwargs) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = response.read().decode()
        blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
        assert blocks.pop() == "data: [DONE]"
        return [json.loads(block.removeprefix("data: ")) for block in blocks]

    def call(self, function, *args):
        """Call a function in the server's event loop; return its result."""

        async def run():
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def socket(self):
        """Return a plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def running(engine, **kwargs):
    """Run a server with an engine while the body runs.

    Args:
        kwargs: of `assemble`.
    """
    started, box = threading.Event(), {}

    async def main():
        bound = bind(engine.config.server)
        try:
            applications = assemble(engine, "9.9", **kwargs)
            serving = Serving(applications, [bound])
            box.update(
                loop=asyncio.get_running_loop(),
                url="http://{}:{}".format(*bound.getsockname()[:2]),
                service=applications.service,
                serving=serving,
            )
            running = asyncio.ensure_future(serving.run(handle_signals=False))
            while not serving.is_listening and not running.done():
                await asyncio.sleep(0.01)
            started.set()
            box["code"] = await running
        finally:
            bound.close()

    def run():
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    if "error" in box:
        thread.join()
        raise box["error"]
    server = RunningServer(engine, box["url"], box["service"], box["serving"], box["loop"])
    try:
        yield server
    finally:
        server.client.close()
        with contextlib.suppress(RuntimeError):
            box["loop"].call_soon_threadsafe(box["serving"].stop)
        thread.join(30)
        assert not thread.is_alive()
