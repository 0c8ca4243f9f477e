"""Conversations stay at their engine; only the conversations of a leaving engine move."""

from acme_affinity import Affinity

from hardpoint.plugins import BalancerContext
from hardpoint.testing import LoadBalancerSuite, ScriptedEngines, scripted_request

pytest_plugins = ["hardpoint.testing"]


class TestAffinity(LoadBalancerSuite):
    balancer = Affinity


def balancer(**options):
    typed_options = Affinity.Options(**options)
    return Affinity(BalancerContext(name="it", options=typed_options, num_engines=4, clock=None))


def chosen(engines, names, **options):
    """Return the ranks of a request for each conversation; each ends before the next one."""
    ranks, it = {}, balancer(**options)
    for name in names:
        request = scripted_request(name, [1, 2, 3], tags={"conversation": name})
        ranks[name] = engines.choose(it, request).rank
        engines.end(name)
    return ranks


def test_only_conversations_of_a_lost_engine_move():
    names = [f"talk {number}" for number in range(200)]
    before, again = (chosen(ScriptedEngines(4), names) for _ in range(2))
    assert before == again
    assert all(list(before.values()).count(rank) > 25 for rank in range(4))
    engines = ScriptedEngines(4)
    engines.views.pop(2)
    after = chosen(engines, names)
    assert {name for name in names if after[name] != before[name]} == {
        name for name in names if before[name] == 2
    }


def test_a_busy_engine_is_left_for_the_next_of_the_conversation():
    engines, it = ScriptedEngines(3), balancer(excess_tokens=100, in_flight_tokens=1)
    tags = {"conversation": "talk"}
    first = engines.choose(it, scripted_request("a", range(90), tags=tags)).rank
    assert engines.choose(it, scripted_request("b", range(20), tags=tags)).rank == first
    second = engines.choose(it, scripted_request("c", range(20), tags=tags)).rank
    assert second != first
    engines.end("a")
    engines.end("b")
    assert engines.choose(it, scripted_request("d", range(20), tags=tags)).rank == first
    assert engines.choose(it, scripted_request("e", [1], tags={})).rank not in (first, second)
