"""Scripted engines for tests of balancers: the counters of a client, without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hardpoint.plugins import EngineCoreRequest, LoadBalancer, SamplingParams
from hardpoint.plugins.requests import Retention

__all__ = ["ScriptedEngine", "ScriptedEngines", "scripted_request"]

_REMEMBERED = 16  # look-ups


def scripted_request(
    request_id: str, prompt: Iterable[int], *, session: str | None = None, **fields: Any
) -> EngineCoreRequest:
    """Return a request as balancers see it.

    Args:
        request_id: unique among requests in flight.
        prompt: token ids.
        session: name of its session, if it has one.
        fields: fields of `EngineCoreRequest`, such as `tags`.
    """
    retention = None if session is None else Retention(session, 60.0)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(),
        retention=retention,
        **fields,
    )


class ScriptedEngine:
    """An engine as a balancer sees it, an `EngineView`; `ScriptedEngines` makes them.

    Attributes:
        rank: number of the engine.
        in_flight: requests that were sent there and have not ended.
        pending_prompt_tokens: prompt tokens of them that are not computed yet.
        num_waiting: requests that waited when `report` was called last.
        num_running: requests that ran then.
        kv_cache_usage: share of its cache that they used then.
        adapters: names of the adapters that are loaded there.
    """

    def __init__(self, rank: int, engines: ScriptedEngines) -> None:
        """Begin with nothing to do; `engines` it is one of."""
        self.rank = rank
        self.in_flight = 0
        self.pending_prompt_tokens = 0
        self.num_waiting = 0
        self.num_running = 0
        self.kv_cache_usage = 0.0
        self.adapters: set[str] = set()
        self._engines = engines

    def __repr__(self) -> str:
        return f"<engine {self.rank}>"

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> int:
        """Return the length of the longest prefix that was computed there, in whole blocks."""
        return self._engines.cached_prefixes(request).get(self.rank, 0)

    def has_session(self, request: EngineCoreRequest) -> bool:
        """Return whether the last request of the same session was sent there."""
        if request.retention is None:
            return False
        return self._engines.sessions.get(request.retention.session) == self.rank

    def has_adapter(self, request: EngineCoreRequest) -> bool:
        """Return whether the request's adapter is loaded there; true for a request without one."""
        return request.lora is None or request.lora.name in self.adapters


class ScriptedEngines:
    """Several engines and their client: requests are sent, computed and ended by calls of a test.

    Attributes:
        views: engines that accept requests, in the order of their ranks.
        block_size: prompt tokens of a block; whole blocks are cached, and none is evicted.
        sessions: rank to which the last request of each session was sent.
    """

    def __init__(self, ranks: int | Iterable[int] = 4, *, block_size: int = 16) -> None:
        """Start engines.

        Args:
            ranks: the ranks, or how many there are, from 0.
            block_size: the attribute.
        """
        self.block_size = block_size
        self.sessions: dict[str, int] = {}
        self._engines: dict[int, ScriptedEngine] = {}
        self._sent: dict[str, tuple[EngineCoreRequest, int]] = {}  # with its rank
        self._pending: dict[str, int] = {}  # tokens by request, in the order of arrival
        self._cached: dict[Any, set[int]] = {}  # ranks by key of a block
        self._found: dict[str, dict[int, int]] = {}
        self.views: list[ScriptedEngine] = []
        for rank in range(ranks) if isinstance(ranks, int) else ranks:
            self.start(rank)

    def start(self, rank: int) -> ScriptedEngine:
        """Start an engine; return its view."""
        engine = self._engines[rank] = ScriptedEngine(rank, self)
        self._order()
        return engine

    def lose(self, rank: int) -> None:
        """End an engine with its requests, its cache and its sessions."""
        for request_id in [key for key, (_, at) in self._sent.items() if at == rank]:
            self.end(request_id)
        del self._engines[rank]
        for ranks in self._cached.values():
            ranks.discard(rank)
        self.sessions = {name: at for name, at in self.sessions.items() if at != rank}
        self._found.clear()
        self._order()

    def choose(self, balancer: LoadBalancer, request: EngineCoreRequest) -> ScriptedEngine:
        """Send a request to the engine that a balancer chooses; return it."""
        return self.send(request, self.views[balancer.choose(request, self.views)].rank)

    def send(self, request: EngineCoreRequest, rank: int) -> ScriptedEngine:
        """Send a request to an engine; return it."""
        engine, name = self._engines[rank], request.request_id
        tokens = len(request.prompt_token_ids) - engine.cached_prefix_tokens(request)
        self._sent[name] = request, rank
        self._pending[name] = tokens
        engine.in_flight += 1
        engine.pending_prompt_tokens += self._pending[name]
        if request.retention is not None:
            self.sessions[request.retention.session] = rank
        return engine

    def compute(self, tokens: int | None = None) -> None:
        """Let each engine compute prompts, in the order of arrival.

        Args:
            tokens: maximum for each engine; None computes all.
        """
        limit = sum(self._pending.values()) if tokens is None else tokens
        left = dict.fromkeys(self._engines, limit)
        for name in list(self._pending):
            request, rank = self._sent[name]
            step = min(self._pending[name], left[rank])
            left[rank] -= step
            self._pending[name] -= step
            self._engines[rank].pending_prompt_tokens -= step
            if not self._pending[name]:
                del self._pending[name]
                self._cache(request, rank)

    def end(self, request_id: str) -> None:
        """End a request."""
        _, rank = self._sent.pop(request_id)
        engine = self._engines[rank]
        engine.in_flight -= 1
        engine.pending_prompt_tokens -= self._pending.pop(request_id, 0)

    def report(self) -> None:
        """Send the statistics of all engines, which stay as they are until the next report."""
        waiting = Counter(self._sent[name][1] for name in self._pending)
        for engine in self._engines.values():
            engine.num_waiting = waiting[engine.rank]
            engine.num_running = engine.in_flight - engine.num_waiting
            engine.kv_cache_usage = min(1.0, engine.in_flight / 256)

    def cached_prefixes(self, request: EngineCoreRequest) -> dict[int, int]:
        """Return the number of leading tokens of a prompt that are cached, by rank.

        As in an engine, one token at least is left to compute.
        """
        prefixes = self._found.get(request.request_id)
        if prefixes is None:
            prefixes = {}
            limit = (len(request.prompt_token_ids) - 1) // self.block_size
            for number, key in enumerate(self._keys(request)[:limit], 1):
                if not (ranks := self._cached.get(key)):
                    break
                prefixes.update(dict.fromkeys(ranks, number * self.block_size))
            self._found[request.request_id] = prefixes
            if len(self._found) > _REMEMBERED:
                del self._found[next(iter(self._found))]
        return prefixes

    def _order(self) -> None:
        self.views = [self._engines[rank] for rank in sorted(self._engines)]

    def _cache(self, request: EngineCoreRequest, rank: int) -> None:
        for key in self._keys(request):
            self._cached.setdefault(key, set()).add(rank)
        self._found.clear()

    def _keys(self, request: EngineCoreRequest) -> list[Any]:
        """Return the keys of the whole blocks of a prompt; each is of all tokens until its end."""
        prompt, size = request.prompt_token_ids, self.block_size
        lora = request.lora and request.lora.name
        key, keys = hash((request.cache_salt, lora)), []
        for start in range(0, len(prompt) - size + 1, size):
            key = hash((key, *prompt[start : start + size]))
            keys.append(key)
        return keys
