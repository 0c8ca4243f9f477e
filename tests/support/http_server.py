"""A server in a thread of the test, and a plain client for it."""

import asyncio
import contextlib
import functools
import json
import socket
import threading

import httpx
import uvicorn.server
import uvloop

from hardpoint.builtin_plugins.server.assembly import assemble
from hardpoint.builtin_plugins.server.operations.addresses import bind, bind_admin
from hardpoint.builtin_plugins.server.operations.loop_watch import Outliving, blame_stop
from hardpoint.builtin_plugins.server.serving import Serving

from . import http_clients  # noqa: F401 - shares the certificates of clients
from .waiting import PATIENCE_S

_TICKS = 10


class _QuickTicks:
    """The module asyncio for uvicorn; its servers check ten times as often for their end."""

    @staticmethod
    def sleep(seconds):
        return asyncio.sleep(seconds / _TICKS)

    def __getattr__(self, name):
        return getattr(asyncio, name)


uvicorn.server.asyncio = _QuickTicks()


class RunningServer:
    """A server that answers at `url`.

    Attributes:
        engine: the engine that it serves.
        service: service of the server, for what no client sees.
        users: application of the users' address.
        client: an httpx client with the server's URL as its base.
        admin: an httpx client of the admin address; None without one.
        thread: thread that the server runs in.
    """

    def __init__(self, engine, url, admin_url, service, serving, loop):
        self.engine, self.url, self.service, self.serving = engine, url, service, serving
        self._loop = loop
        self.client = client_of(url)
        self.admin = admin_url and client_of(admin_url)
        self.thread, self.box, self.users = None, {}, None
        self.port = 0 if url.startswith("unix:") else int(url.rpartition(":")[2])

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

    def held_stream(self, path, body, heartbeat=": waiting\n\n", count=1):
        """Return status and text of a stream; a HeldEngine goes on after as many heartbeats."""
        text = ""
        with self.client.stream("POST", path, json=body) as response:
            for part in response.iter_text():
                text += part
                if text.count(heartbeat) >= count:
                    self.engine.go_on.set()
        return response.status_code, text

    def call(self, function, *args):
        """Call a function in the server's event loop; return its result."""

        async def run():
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    @property
    def code(self):
        """The exit code, once the server has ended."""
        return self.box["code"]

    def socket(self):
        """Return a plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)


def client_of(url):
    """Return a client of httpx for a URL, or for `unix:PATH`."""
    if not url.startswith("unix:"):
        return httpx.Client(base_url=url, timeout=PATIENCE_S)
    transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
    return httpx.Client(base_url="http://localhost", transport=transport, timeout=PATIENCE_S)


async def _serve(engine, started, box, kwargs):
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(contextlib.closing(bind(engine.config.server)))
        admin = bind_admin(engine.config.server)
        if admin is not None:
            stack.enter_context(contextlib.closing(admin))
        applications = assemble(engine, "9.9", bound=bound.host, admin=admin, **kwargs)
        box.update(
            loop=asyncio.get_running_loop(),
            url=bound.url,
            admin_url=admin and admin.url,
            service=applications.service,
            users=applications.users,
            serving=Serving(applications, bound, admin),
        )
        task = asyncio.current_task()

        def announce():
            box["outliving"].begin(
                task, functools.partial(blame_stop, engine, applications.service.faults)
            )
            started.set()

        box["code"] = await box["serving"].run(handle_signals=False, announce=announce)


@contextlib.contextmanager
def running(engine, **kwargs):
    """Run a server with an engine while the body runs.

    Args:
        kwargs: keyword arguments of `assemble`.
    """
    started, box = threading.Event(), {"outliving": Outliving()}

    def run():
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                box["outliving"].run(runner, _serve(engine, started, box, kwargs))
        except BaseException as error:
            box["error"] = error
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    if "error" in box:
        thread.join()
        raise box["error"]
    keys = ("url", "admin_url", "service", "serving", "loop")
    server = RunningServer(engine, *(box[key] for key in keys))
    server.thread, server.box, server.users = thread, box, box["users"]
    try:
        yield server
    finally:
        server.client.close()
        if server.admin is not None:
            server.admin.close()
        with contextlib.suppress(RuntimeError):
            box["loop"].call_soon_threadsafe(box["serving"].stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
