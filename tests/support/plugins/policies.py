"""Requests and loads for scheduling policies in tests."""

from __future__ import annotations

from hardpoint.plugins import EngineCoreRequest, Load, PolicyContext, Request, SamplingParams
from hardpoint.typed import convert

LOAD = Load(
    now=0.0,
    num_running=1,
    max_num_seqs=1,
    num_waiting=1,
    token_budget=1,
    num_free_blocks=0,
    num_blocks=1,
)


def build(cls, **options):
    """Build a policy; its options stand under `plugin.it`."""
    checked = convert(options, cls.Options, path="plugin.it")
    return cls(PolicyContext(name="it", options=checked))


def request(
    name="r", *, prompt=1, max_tokens=1, arrival=0.0, priority=0, tenant=None, tags=None, order=0
):
    """Make a request with `prompt` tokens; `tenant` is short for the tag of that name."""
    source = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1] * prompt,
        params=SamplingParams(max_tokens=max_tokens),
        arrival_time=arrival,
        priority=priority,
        tags=tags or ({"tenant": tenant} if tenant else {}),
    )
    return Request(source, order)
