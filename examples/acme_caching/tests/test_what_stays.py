"""Each policy keeps blocks that a policy in order of release loses."""

import pytest
from acme_caching import AdaptiveReplacement, LeastFrequentlyUsed, TwoQueues

from hardpoint.plugins import EvictionPolicy
from hardpoint.testing import measure_hit_rate

SYSTEM = list(range(64))  # 4 blocks of 16 tokens


class Oldest(EvictionPolicy):
    contract = 2

    def __init__(self, context):
        super().__init__(context)
        self.order = {}

    def released(self, block_ids):
        self.order |= dict.fromkeys(block_ids)

    def taken(self, block_ids):
        for block in block_ids:
            del self.order[block]

    dropped = taken

    def evict(self, count):
        chosen = list(self.order)[:count]
        self.taken(chosen)
        return chosen


def ask(number):
    return [*SYSTEM, 1000 + number]


def document(number, blocks=10):
    return [10_000 + number, *range(20_000, 20_000 + 16 * blocks - 1)]


def found(policy, prompts, last, num_blocks=16, **options):
    """Return how many blocks the last of some prompts finds."""

    def tokens_found(them):
        rate = measure_hit_rate(policy, them, num_blocks=num_blocks, options=options)
        return rate * sum(map(len, them))

    return round((tokens_found([*prompts, last]) - tokens_found(prompts)) / 16)


SCAN = [document(number) for number in range(4)]


@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [(Oldest, 0), (LeastFrequentlyUsed, 4), (AdaptiveReplacement, 4), (TwoQueues, 0)],
)
def test_a_prompt_that_was_used_often_survives_a_scan(policy, num_blocks):
    popular = [ask(number) for number in range(5)]
    assert found(policy, [*popular, *SCAN], ask(9)) == num_blocks


@pytest.mark.parametrize(
    ("policy", "expected", "options"), [(Oldest, 0, {}), (TwoQueues, 4, {"remembered": 1.0})]
)
def test_2q_keeps_what_came_back_after_it_was_evicted(policy, expected, options):
    between = [document(number) for number in range(50, 54)]
    came_back = [ask(1), *between, ask(2)]
    assert found(policy, came_back, ask(3), num_blocks=32, **options) == 4
    assert found(policy, [*came_back, *SCAN], ask(9), num_blocks=32, **options) == expected


def test_a_prompt_that_was_popular_once_makes_room():
    """Later ones that are used less often have more hits, counted from the same time."""
    popular = [ask(number) for number in range(5)]
    later = [document(number // 2, 6) for number in range(60)]
    assert found(LeastFrequentlyUsed, [*popular, *later], ask(9)) == 0


def test_with_no_memory_2q_is_in_the_order_of_release():
    prompts = [ask(1), document(1), ask(2), *SCAN, ask(3), document(2), ask(4)]
    rates = [
        measure_hit_rate(TwoQueues, prompts, num_blocks=16, options={"remembered": 0.0}),
        measure_hit_rate(Oldest, prompts, num_blocks=16),
    ]
    assert rates[0] == rates[1] > 0
