"""A load balancer that fails: the engine with the fewest requests in flight is taken."""

from __future__ import annotations

import numpy as np
import pytest
from support.broken import balancers as broken

from hardpoint.builtin_plugins.balancers.least_cost import LeastCost
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import guard
from hardpoint.plugins import BalancerContext, LoadBalancer
from hardpoint.plugins.component import Source
from hardpoint.testing import ScriptedEngines, scripted_request

SOURCE = Source("odd", "acme:Odd", "acme", "1.0", "parallel.balancer (file hardpoint.toml)")
CALL = "choose() of request 'r1' "


@pytest.fixture
def engines():
    """Four engines, of which that at index 2 has the fewest requests."""
    engines = ScriptedEngines([0, 1, 3, 4])
    for number, rank in enumerate([0, 0, 1, 1, 3, 4, 4]):
        engines.send(scripted_request(f"o{number}", [5]), rank)
    return engines


class Guarded:
    """A guarded balancer, and its faults."""

    def __init__(self, cls, ends_engine=()):
        context = BalancerContext(name="odd", options=cls.Options(), num_engines=4, clock=None)
        self.faults = StepFaults(ends_engine)
        report, calls = self.faults.reporter(SOURCE), self.faults.calls("balancers", SOURCE)
        self.balancer = guard(cls(context), "balancers", report, calls)

    def choose(self, engines, name="r1"):
        return self.balancer.choose(scripted_request(name, [1, 2, 3]), engines.views)


def returning(value):
    """Return a balancer that returns a value, or what a function of the engines returns."""

    class Odd(LoadBalancer):
        contract = 1

        def choose(self, request, engines):
            return value(engines) if callable(value) else value

    return Odd


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1", "returned '1', expected an index of engines"),
        (None, "returned None, expected an index of engines"),
        (1.0, "returned 1.0, expected an index of engines"),
        (-1, "returned -1, expected an index of engines, from 0 to 3"),
        (4, "returned 4, expected an index of engines, from 0 to 3"),
        (2**80, f"returned {2**80}, expected an index of engines, from 0 to 3"),
        (True, "returned True, expected an index of engines, from 0 to 3"),
        (lambda engines: engines[3].rank, "returned 4, expected an index of engines, from 0 to 3"),
        (lambda engines: engines[7], "failed: IndexError: list index out of range"),
        (lambda _: {}["tenant"], "failed: KeyError: 'tenant'"),
        (lambda _: iter(()).__next__(), "failed: StopIteration: "),
    ],
)
def test_a_fault_is_counted_and_the_fewest_in_flight_decide(engines, value, problem):
    guarded = Guarded(returning(value))
    assert guarded.choose(engines) == 2
    assert guarded.choose(engines) == 2
    fault = guarded.faults.report()["odd"]
    assert fault.count == 2
    assert fault.message.startswith(f"{SOURCE}: {CALL}{problem}")


@pytest.mark.parametrize(("value", "index"), [(0, 0), (3, 3), (np.int64(1), 1)])
def test_any_index_is_taken(engines, value, index):
    guarded = Guarded(returning(value))
    chosen = guarded.choose(engines)
    assert (chosen, type(chosen)) == (index, int)
    assert guarded.faults.report() == {}


def test_with_on_error_a_fault_ends_the_engine(engines):
    guarded = Guarded(broken.ReturnsNothing, ends_engine=["odd"])
    with pytest.raises(PluginFaultError, match=r"^plugin 'odd' .*choose\(\) of request 'r1' retu"):
        guarded.choose(engines)


def test_one_that_fails_at_times_decides_the_other_times(engines):
    guarded = Guarded(broken.CountsOnce)
    engines.lose(0)
    found = [guarded.choose(engines, f"r{number}") for number in range(8)]
    assert found == [1, 2, 1, 0, 1, 2, 1, 0]  # 1 has the fewest, where 3 is returned
    assert guarded.faults.report()["odd"].count == 2


def test_a_guarded_balancer_has_what_the_client_reads(engines):
    guarded = Guarded(LeastCost)
    assert guarded.balancer.uses_cached_prefixes is True
    assert guarded.choose(engines) == 2
    assert guarded.faults.report() == {}
