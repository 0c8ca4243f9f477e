"""A server with the live view at `/`, and changing figures."""

import contextlib
import dataclasses

import msgspec
from starlette.responses import JSONResponse

from hardpoint.builtin_plugins.server.routes.page import live_routes
from hardpoint.plugins import PrefixCacheStats, SchedulerStats
from hardpoint.plugins.requests.stats import Health, PluginMeter
from hardpoint.plugins.scheduling.step_record import LiveRequest, WaitingFor, WaitReason
from hardpoint.plugins.server import Authenticator, Client, Route
from support.fake_engine import FakeEngine, configured
from support.http_server import running

PLUGINS = [
    {"kind": "logits_processors", "name": "temperature", "version": "0.1.0"},
    {"kind": "logits_processors", "name": "acme_bias", "version": "1.2"},
    {"kind": "scheduling_policies", "name": "fcfs", "version": "0.1.0"},
    {"kind": "samplers", "name": "default", "version": "0.1.0"},
    {"kind": "output_parsers", "name": "temperature", "version": "3"},
]


class LiveFigures:
    """Answers of the routes of the admin address; each look at the figures moves them.

    Attributes:
        polls: how often they were asked.
        error: raised instead of them.
    """

    def __init__(self):
        self.polls, self.error = 0, None

    def requests(self):
        self.polls += 1
        running = [
            LiveRequest(
                request_id=f"r{i}-0",
                external_id=f"chat-{i}",
                index=0,
                status="running",
                num_prompt_tokens=120 + i,
                num_computed_tokens=120 + i + 7 * self.polls,
                num_output_tokens=(7 + 5 * (self.polls % 3)) * self.polls,
                priority=0,
                age_seconds=3.0 * i + self.polls,
                tags={"team": "blue"} if i % 2 else {},
            )
            for i in range(3)
        ]
        reason = WaitReason(WaitingFor.BLOCKS, "needs 12 KV blocks, 3 are free", 12, 3)
        waiting = LiveRequest(
            request_id="w-0",
            external_id="report",
            index=0,
            status="waiting",
            num_prompt_tokens=1800,
            num_computed_tokens=0,
            num_output_tokens=0,
            priority=5,
            age_seconds=72.0 + self.polls,
            waits_for=reason,
        )
        return {"requests": [*running, waiting]}

    def stats(self):
        return SchedulerStats(
            num_running=3,
            num_waiting=1,
            kv_cache_usage=min(0.5 + 0.06 * (self.polls % 7), 1.0),
            prefix_cache=PrefixCacheStats(9, 4000, 1000 + 10 * self.polls),
            num_preemptions=2,
        )

    def plugins(self):
        return {
            "plugins": PLUGINS,
            "meters": {
                "temperature": PluginMeter(100, 300, 0.02 * self.polls, 0, 0, 0.001),
                "acme_bias": PluginMeter(100, 90, 0.3 * self.polls, 4, 2, 0.2),
            },
        }

    def routes(self):
        def answering(figures):
            async def endpoint(request):
                if self.error is not None:
                    raise self.error
                return JSONResponse(msgspec.to_builtins(figures()))

            return endpoint

        named = {"requests": self.requests, "engines/stats": self.stats, "plugins": self.plugins}
        return [Route(path=f"/{name}", endpoint=answering(f)) for name, f in named.items()]


@contextlib.contextmanager
def running_live_view(key=None):
    """Run the live view with its own key, or none; yield the server and its figures."""
    figures = LiveFigures()
    page = [dataclasses.replace(route, admin=False) for route in live_routes()]
    health = Health({"acme_bias": 4}, {"acme_bias": "IndexError in process"})
    open_routes = [route.path for route in page]
    engine = FakeEngine(config=configured(page=False, open_routes=open_routes), health_now=health)
    engine.extensions = [("admin", route) for route in [*page, *figures.routes()]]
    if key is not None:
        engine.extensions.append(("admin", bearer(key)))
    with running(engine) as server:
        yield server, figures


def bearer(key):
    """Return an authenticator that knows one key."""

    async def authenticate(headers, path):
        return Client(name="one") if headers.get("authorization") == f"Bearer {key}" else None

    return Authenticator(authenticate=authenticate)
