"""Requests of the tests of AsyncLLM, and the configuration of its engine."""

from __future__ import annotations

from hardpoint import RequestOutputKind, SamplingParams
from hardpoint.plugins import hookimpl
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Hooked:
    """Rejects requests with a tag."""

    contract = 1
    finished: list[str] = []

    @hookimpl
    def request_received(self, request):
        if "refuse" in request.tags:
            raise ValueError("not today")

    @hookimpl
    def request_finished(self, output):
        self.finished.append(output.request_id)


def endless(seconds: float = 0.002, max_tokens: int = 20_000, **fields) -> SamplingParams:
    slow = {"slow": {"seconds": seconds}}
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        **({"output_kind": RequestOutputKind.DELTA, "plugin_args": slow} | fields),
    )


def config(folder, **extra):
    enable = ["support.plugins.slow:Slow", f"{__name__}:Hooked"]
    return scripted_config(folder, {"plugins": {"enable": enable}, **extra})


async def collect(outputs) -> list:
    return [output async for output in outputs]
