"""Read-only views of requests, for plugins with faults that fail no request."""

from __future__ import annotations

import pytest
from support.driving import run

from hardpoint import SamplingParams
from hardpoint.plugins import Speculator
from hardpoint.testing import ScriptedSpeculator, scripted_engine

REFUSED: list[str] = []


def attempt(change):
    """Change an object of the engine; note whether it was refused."""
    try:
        change()
    except (TypeError, AttributeError) as refused:
        REFUSED.append(type(refused).__name__)
    else:
        REFUSED.append("changed")


class Meddling(ScriptedSpeculator):
    """Tries to change the requests that it drafts for."""

    contract = 1

    def _meddle(self, request):
        attempt(lambda: request.prompt_token_ids.clear())
        attempt(lambda: request.output_token_ids.append(1))
        attempt(lambda: setattr(request.params, "temperature", 9.0))

    def start(self, request):
        self._meddle(request)
        return super().start(request)

    def propose(self, requests, budget):
        for request in requests:
            self._meddle(request)
        return super().propose(requests, budget)


@pytest.mark.parametrize("num_blocks", [200, 14], ids=["roomy", "preempted"])
def test_a_speculator_cannot_change_requests(scripted, num_blocks):
    REFUSED.clear()
    assert issubclass(Meddling, Speculator)
    jobs = [
        (f"r{i}", [1 + i] * 20, SamplingParams(max_tokens=12, seed=i, ignore_eos=True))
        for i in range(4)
    ]
    cache = {
        "max_model_len": 80,
        "kv_cache": {"block_size": 8, "num_blocks": num_blocks, "watermark": 0.0},
    }
    plain = scripted_engine(scripted, cache)
    expected = run(plain, jobs)
    plain.close()
    use = {"use": [f"{__name__}:Meddling"], "adaptive": False}
    options = {"meddling": {"right": 0.5, "replies": []}}
    engine = scripted_engine(scripted, cache | {"speculation": use, "plugin": options})
    assert run(engine, jobs) == expected
    engine.close()
    assert REFUSED
    assert "changed" not in REFUSED
