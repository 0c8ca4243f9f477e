"""Hooks with one mistake each."""

from __future__ import annotations

import asyncio
import itertools
import time

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hardpoint.plugins import Command, Sampler, StepRecord, hookimpl
from hardpoint.plugins.server import (
    Authenticator,
    Client,
    Middleware,
    ResponseStore,
    Route,
    Transform,
)
from support.samples import Sample, spend


class Hooks(Sample, contract=1):
    """Correct: has none."""


class NoContract:
    @hookimpl
    def engine_closing(self):
        pass


class UnknownHook(Hooks):
    @hookimpl
    def request_ended(self, output):
        pass


class UnknownArgument(Hooks):
    @hookimpl
    def request_finished(self, result):
        pass


class Unmarked(Hooks):
    @hookimpl
    def engine_closing(self):
        pass

    def request_finished(self, output):
        pass


class Asynchronous(Hooks):
    @hookimpl
    async def engine_closing(self):
        pass


class NeedsTokens(Hooks):
    @hookimpl
    def request_finished(self, output):
        self.last = output.outputs[0].token_ids[-1]


class NeedsTags(Hooks):
    @hookimpl
    def request_received(self, request):
        request.priority = len(request.tags["tenant"])


class ChangesRecord(Hooks):
    @hookimpl
    def step_planned(self, record):
        record.scheduled["r-9"] = 1


class ChangesInfo(Hooks):
    @hookimpl
    def engine_started(self, info):
        dict.__setitem__(info, "model", "mine")


class RenamesRequest(Hooks):
    @hookimpl
    def request_received(self, request):
        request.request_id += "!"


class WrongValue(Hooks):
    @hookimpl
    def request_received(self, request):
        request.params = msgspec.structs.replace(request.params, max_tokens=-5)


class EmptiesPrompt(Hooks):
    @hookimpl
    def request_received(self, request):
        request.prompt_token_ids.clear()


class Counts(Hooks):
    count = 0

    @hookimpl
    def request_received(self, request):
        self.count += 1
        request.tags = {"number": str(self.count)}


class ClosesWhatIsOpen(Hooks):
    @hookimpl
    def engine_started(self, info):
        self.model = info["model"]

    @hookimpl
    def engine_closing(self):
        del self.model


class Blocks(Hooks):
    @hookimpl
    def engine_started(self, info):
        time.sleep(5)


class Slow(Hooks):
    @hookimpl
    def step_planned(self, record):
        spend(0.02)


def run(options, context):
    return 0


class NoCommands(Hooks):
    @hookimpl
    def cli_commands(self):
        return ["hello"]


class Twins(Hooks):
    @hookimpl
    def cli_commands(self):
        return [Command("one", "Say one.", lambda parser: None, run)] * 2


class ProvidesList(Hooks):
    @staticmethod
    @hookimpl
    def hardpoint_components():
        return [NoCommands]


class ProvidesUnversioned(Hooks):
    @staticmethod
    @hookimpl
    def hardpoint_components():
        return {"unversioned": Unversioned}


class Unversioned(Sampler):
    def sample(self, logits, rows):
        return logits.argmax(-1)


class ProvidesInTurn(Hooks):
    turns = itertools.count()

    @classmethod
    @hookimpl
    def hardpoint_components(cls):
        return {f"unversioned_{next(cls.turns)}": Versioned}


class Versioned(Unversioned):
    contract = 1


class Right(Hooks):
    """Correct: changes, refuses and counts."""

    def __init__(self):
        self.finished = 0

    @hookimpl
    def request_received(self, request):
        if request.timeout:
            raise ValueError("timeout: not here")
        request.tags = {**request.tags, "seen": "yes"}
        request.prompt_token_ids = [2, *request.prompt_token_ids]

    @hookimpl
    def request_finished(self, output):
        self.finished += len(output.outputs)

    @hookimpl
    def step_planned(self, record):
        self.step = record.step


def adds(*extensions):
    """Return a plugin that adds these to a server."""

    class Adds(Hooks):
        @hookimpl
        def server_extensions(self, server):
            return list(extensions)

    Adds.__qualname__ = "Adds"
    return Adds


async def ask_twice(app, scope, receive, send):
    await app(scope, receive, send)
    await app(scope, receive, send)


async def swallow(app, scope, receive, send):
    pass


async def begin_only(app, scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def middleware(function):
    return Middleware(wrap=lambda app: lambda *arguments: function(app, *arguments))


async def no_body(call, body):
    pass


async def needs_key(headers, path):
    return Client(name=headers["authorization"])


async def returns_true(headers, path):
    return True


async def waits(call, body):
    await asyncio.sleep(60)


async def endpoint(request):
    return Client(name="x")


def plain_endpoint(request):
    return Client(name="x")


class Calls(Hooks):
    @hookimpl
    def server_extensions(self, server):
        server.engine.generate("x")
        return []


class Alternates(Hooks):
    route = Route(path="/acme", endpoint=endpoint)

    def __init__(self):
        self.calls = 0

    @hookimpl
    def server_extensions(self, server):
        self.calls += 1
        return [self.route] * (self.calls % 2)


async def start_as_text(app, scope, receive, send):
    await send({"type": "http.response.start", "status": "200", "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def add_text_header(app, scope, receive, send):
    async def with_header(message):
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], ("x-acme", "yes")]
        await send(message)

    await app(scope, receive, with_header)


async def refuse_by_number(app, scope, receive, send):
    raise HTTPException(429, "later", {"retry-after": 5})


class TextStatus(Response):
    """A response with a text as its status."""

    def __init__(self):
        super().__init__("ok")
        self.status_code = "200"


class TextHeaders(Response):
    """A response with texts as its headers."""

    def init_headers(self, headers=None):
        self.raw_headers = [("x-acme", "yes")]


class Unfinished(Response):
    """A response without an end."""

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})


def route_of(make):
    async def answer(request):
        return make()

    return adds(Route(path="/acme/{name}", endpoint=answer))


class ReadsAndGenerates(Hooks):
    """Correct: its routes read bodies, and use the engine."""

    @hookimpl
    def server_extensions(self, server):
        async def reads(request):
            return await server.while_connected(request, server.read(request, StepRecord))

        async def generates(request):
            return await server.engine.generate("x")

        async def refuses(request):
            raise HTTPException(404, "there is no such thing")

        return [
            Route(path="/a/{number:int}", endpoint=reads, methods=["POST"]),
            Route(path="/b", endpoint=generates),
            Route(path="/c", endpoint=refuses),
        ]


StartsAsText = adds(middleware(start_as_text))
TextHeader = adds(middleware(add_text_header))
RefusesByNumber = adds(middleware(refuse_by_number))
RouteTextStatus = route_of(TextStatus)
RouteTextHeaders = route_of(TextHeaders)
RouteNumberHeader = route_of(lambda: Response("ok", headers={"x-acme": 1}))
RouteUnfinished = route_of(Unfinished)
RouteDict = route_of(dict)
RouteUnencodable = route_of(lambda: Client(name=object()))
PlainRoute = adds(Route(path="/acme", endpoint=plain_endpoint))
BadPath = adds(Route(path="acme", endpoint=endpoint))
AsksTwice = adds(middleware(ask_twice))
Swallows = adds(middleware(swallow))
BeginsOnly = adds(middleware(begin_only))
LosesBody = adds(Transform(request=no_body))
Waits = adds(Transform(response=waits))
BadEvent = adds(Transform(event=lambda call, body: [body]))
NeedsKey = adds(Authenticator(authenticate=needs_key))
ReturnsTrue = adds(Authenticator(authenticate=returns_true))


class Kept:
    """A correct store, unless a subclass overrides a method."""

    def __init__(self):
        self.kept = {}

    def key(self, owner, response_id):
        return owner, response_id

    async def put(self, owner, response_id, content):
        self.kept[self.key(owner, response_id)] = content

    async def get(self, owner, response_id):
        return self.kept.get(self.key(owner, response_id))

    async def delete(self, owner, response_id):
        return self.kept.pop(self.key(owner, response_id), None) is not None


class OfAll(Kept):
    """Owners see the records of others."""

    def key(self, owner, response_id):
        return response_id


class KeepsFirst(Kept):
    """A second content does not replace the first one."""

    async def put(self, owner, response_id, content):
        self.kept.setdefault(self.key(owner, response_id), content)


class AsText(Kept):
    """Contents come back as text."""

    async def put(self, owner, response_id, content):
        self.kept[self.key(owner, response_id)] = content.decode("latin-1")


class NeverDeletes(Kept):
    """Nothing is deleted."""

    async def delete(self, owner, response_id):
        return self.key(owner, response_id) in self.kept


class DeletesInSilence(Kept):
    """A deletion does not report its result."""

    async def delete(self, owner, response_id):
        self.kept.pop(self.key(owner, response_id), None)


class Misses(Kept):
    """A response that is not there is an error."""

    async def get(self, owner, response_id):
        return self.kept[self.key(owner, response_id)]


def stores(make_store):
    """Return a plugin that adds a store."""
    store = make_store()
    return adds(ResponseStore(put=store.put, get=store.get, delete=store.delete))


GoodStore = stores(Kept)
SharesResponses = stores(OfAll)
KeepsFirstResponse = stores(KeepsFirst)
ReturnsText = stores(AsText)
DeletesNothing = stores(NeverDeletes)
DeletesQuietly = stores(DeletesInSilence)
RaisesForUnknown = stores(Misses)
