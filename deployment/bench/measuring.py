"""Sends loads to a server, one after the other, and reports each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hardpoint.plugins import ConfigError
from hardpoint.simulation import Objective, SimulatedLoad
from hardpoint.typed import Strict, convert

from .load import Traffic
from .measures import report
from .processes import LoadRun, send_load
from .prompts import RequestFields
from .server_facts import ServerAddress, ask_server
from .server_process import ServerStart, running_server

API_KEY = "HARDPOINT_API_KEY"
"""Variable of the environment with the key of a server that was started."""
NOT_COUNTED = "/tokenize is not available: a term of a prompt counts as a token."


class Plan(Strict):
    """The loads that are sent to a server.

    Attributes:
        load: the requests.
        traffic: how they are sent, one load after the other.
        fields: fields of the requests.
        objective: the service level objective.
    """

    load: SimulatedLoad = SimulatedLoad()
    traffic: list[Traffic]
    fields: RequestFields = RequestFields()
    objective: Objective = Objective()

    def checked(self) -> Plan:
        """Return this plan.

        Raises:
            ConfigError, TraceError: something in it is wrong; names it.
        """
        if not self.traffic:
            raise ConfigError("traffic: expected at least one, got none")
        names = [traffic.name for traffic in self.traffic]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"traffic: {name!r} is given twice")
        for traffic in self.traffic:
            traffic.check()
        self.load.requests()
        return self


def plan_of(fields: Mapping[str, Any] | Plan) -> Plan:
    """Return a plan by its fields.

    Raises:
        ConfigError, TraceError: something in it is wrong; names it.
    """
    plain = msgspec.to_builtins(fields)
    return convert(plain, Plan, path="").checked()


def measure_server(
    server: ServerAddress | ServerStart | Mapping[str, Any], plan: Plan | Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Send loads to a server that speaks OpenAI's API; report what its clients see.

    An interrupt (SIGINT) ends the load that is being sent, whose report has what was measured, and
    no further one is sent.

    Args:
        server: the server, or one to start; or the fields of `ServerAddress` or of `ServerStart`.
        plan: the loads, or the fields of `Plan`.

    Yields:
        `{"record": "progress", "load", "good", "failed", "of", "seconds"}`, where `of` is None if a
        load has no number of requests; per load `{"record": "result", "load", "report", "curves",
        "interrupted"}`; and at last `{"record": "end", "model", "notes", "interrupted"}`.

    Raises:
        ConfigError, TraceError: something given is wrong; names it.
        HardpointError: there is no server at the address, or it does not start.
    """
    wanted = plan_of(plan)
    if isinstance(server, Mapping) and "url" in server:
        server = convert(dict(server), ServerAddress, path="")
    if isinstance(server, ServerAddress):
        yield from _send_loads(server, wanted)
        return
    start = convert(msgspec.to_builtins(server), ServerStart, path="")
    with running_server(start) as running:
        key = os.environ.get(API_KEY, "")
        yield from _send_loads(ServerAddress(url=running.url, api_key=key), wanted)


def _send_loads(server: ServerAddress, plan: Plan) -> Iterator[dict[str, Any]]:
    target = server.target
    fields, costs = ask_server(server, plan.fields)
    is_interrupted = False
    for traffic in plan.traffic:
        run = LoadRun(target, server.headers, fields, costs, plan.load, traffic)
        of = traffic.num_requests(plan.load)
        for sent in send_load(run):
            yield {
                "record": "progress",
                "load": traffic.name,
                "good": sent.good,
                "failed": sent.failed,
                "of": of,
                "seconds": sent.seconds,
            }
        assert sent.outcomes is not None
        made, curves = report(sent.outcomes, plan.objective)
        yield {
            "record": "result",
            "load": traffic.name,
            "report": msgspec.to_builtins(made),
            "curves": curves,
            "interrupted": sent.is_interrupted,
        }
        if is_interrupted := sent.is_interrupted:
            break
    notes = [] if costs.measured else [NOT_COUNTED]
    yield {"record": "end", "model": fields.model, "notes": notes, "interrupted": is_interrupted}
