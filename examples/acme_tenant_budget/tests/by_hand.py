"""Helpers to test the part without an engine."""

from acme_tenant_budget import TenantBudget

from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    Request,
    SamplingParams,
    StepPartContext,
)
from hardpoint.plugins.step_part import EngineHalfContext


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def halves(**options):
    """Return the engine's half and its clock."""
    cls, clock = TenantBudget, Clock()
    config = EngineConfig(model="none")
    part = cls(StepPartContext(name="it", options=cls.Options(**options), config=config))
    context = EngineHalfContext(
        components=None,
        describe_fault=repr,
        faults=None,
        clock=clock,
        scheduler="the scheduler",
        vocab_size=100,
        vocabulary=None,
        block_size=16,
        world_size=1,
        block_hashes=lambda _request, _num_blocks: [],
        publish=lambda _events: None,
    )
    return part.engine_half(context), clock


def request(name, tenant=None, *, prompt=5, max_tokens=5):
    tags = {} if tenant is None else {"tenant": tenant}
    source = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1] * prompt,
        params=SamplingParams(max_tokens=max_tokens),
        tags=tags,
    )
    return Request(source)
