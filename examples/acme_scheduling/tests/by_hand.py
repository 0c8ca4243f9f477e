"""Helpers to test a policy without an engine."""

from hardpoint.plugins import EngineCoreRequest, Load, PolicyContext, Request, SamplingParams

LOAD = Load(
    now=0.0,
    num_running=1,
    max_num_seqs=8,
    num_waiting=1,
    token_budget=100,
    num_free_blocks=10,
    num_blocks=10,
)


def build(cls, **options):
    return cls(PolicyContext(name="it", options=cls.Options(**options)))


def request(name, *, arrival=0.0, timeout=None, tags=None):
    source = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(),
        arrival_time=arrival,
        timeout=timeout,
        tags=tags or {},
    )
    return Request(source)
