import copy
import random

import pytest
from acme_sampling.dry import Dry
from by_hand import Letters, Rows, build, prepare, request_of


def dry():
    return build(Dry, "dry")


def penalties(processor, *requests):
    """Return each row's penalties by token."""
    edits = processor.edits(Rows(processor, *requests))
    result = [{} for _ in requests]
    if edits is not None:
        for row, token, value in zip(edits.row, edits.token, edits.value, strict=True):
            result[row][token] = -value
    return result


def test_what_followed_the_newest_tokens_before_is_punished():
    it = dry()
    request = request_of(it, [1, 2, 3, 4, 9, 1], [2, 3], multiplier=0.5, base=2.0)
    assert penalties(it, request) == [{4: 1.0}]  # three tokens repeat: 0.5 * 2 ** (3 - 2)


def test_repetitions_shorter_than_allowed_cost_nothing():
    it = dry()
    short = request_of(it, [3, 4, 9, 3], allowed_length=2)
    assert it.edits(Rows(it, short)) is None
    assert penalties(it, request_of(it, [3, 4, 9, 3], allowed_length=1)) == [{4: 0.8}]


def test_of_several_repetitions_the_longest_counts():
    it = dry()
    tokens = [1, 2, 7, 5, 1, 2, 7, 2, 8, 5, 1, 2]
    request = request_of(it, tokens, multiplier=1.0, base=2.0, allowed_length=1)
    assert penalties(it, request) == [{7: 4.0, 8: 1.0}]  # "5 1 2" -> 7, "2" -> 8


def test_a_breaker_ends_a_repetition():
    it = dry()
    tokens = [1, 2, 3, 4, 1, 2, 3]
    plain, broken = (
        request_of(it, tokens, multiplier=1.0, base=2.0, allowed_length=1, breaker_ids=breakers)
        for breakers in ([], [1])
    )
    assert penalties(it, plain, broken) == [{4: 4.0}, {4: 2.0}]
    for breaker in (3, 4):  # the newest token, or the one that would follow
        request = request_of(it, tokens, breaker_ids=[breaker], allowed_length=1)
        assert penalties(it, request) == [{}]


def test_only_the_range_is_looked_at():
    it = dry()
    tokens = [1, 2, 3, 9, 8, 1, 2]
    for size, wanted in ((0, {3: 1.0}), (7, {3: 1.0}), (6, {}), (5, {})):
        assert penalties(it, request_of(it, tokens, multiplier=1.0, range=size)) == [wanted]


def test_the_penalty_of_a_long_repetition_stays_a_number():
    it = dry()
    (penalty,) = penalties(it, request_of(it, [5] * 500, multiplier=100, base=4))
    assert penalty == {5: 100 * 4.0**48}


def naive(tokens, arguments):
    """The original's way: from every place where the newest token stood, go back."""
    if arguments.range:
        tokens = tokens[-arguments.range :]
    lengths = {}
    for at in range(len(tokens) - 1):
        length = 0
        while length < min(50, at + 1) and tokens[at - length] == tokens[-1 - length]:
            if tokens[at - length] in arguments.breaker_ids:
                break
            length += 1
        if length and tokens[at + 1] not in arguments.breaker_ids:
            lengths[tokens[at + 1]] = max(lengths.get(tokens[at + 1], 0), length)
    return {
        token: arguments.multiplier * arguments.base ** (length - arguments.allowed_length)
        for token, length in lengths.items()
        if length >= arguments.allowed_length
    }


def test_agrees_with_going_back_from_everywhere():
    it = dry()
    chance = random.Random(0)
    for _ in range(150):
        arguments = {
            "allowed_length": chance.randint(1, 3),
            "range": chance.choice([0, 0, 5, 20]),
            "breaker_ids": chance.choice([[], [0], [0, 1]]),
        }
        tokens = chance.choices(range(chance.randint(1, 4)), k=chance.randint(1, 130))
        split = chance.randint(0, len(tokens))
        begun = request_of(it, tokens[:split], **arguments)
        rows = Rows(it, begun)
        for token in tokens[split:]:
            begun.state["dry"] = it.advance(begun.state["dry"], token)
        edits = it.edits(rows)
        penalties_by_token = dict(zip(edits.token, edits.value, strict=True)) if edits else {}
        wanted = naive(tokens, begun.arguments["dry"])
        assert {token: -value for token, value in penalties_by_token.items()} == pytest.approx(
            wanted
        )
        again = request_of(it, tokens[:split], tokens[split:], **arguments)
        assert penalties(it, again) == [pytest.approx(wanted)]


def test_a_fork_leaves_the_state_alone():
    it = dry()
    request = request_of(it, [1, 2, 3, 1, 2])
    rows = Rows(it, request)
    (state,) = rows.states()
    before = copy.deepcopy(state)
    fork = it.fork(state)
    for token in (3, 1, 2, 77):
        fork = it.advance(fork, token)
    assert state == before
    assert fork.tokens == [1, 2, 3, 1, 2, 3, 1, 2, 77]
    it.edits(rows)
    assert state == before


def test_breakers_are_spelt_as_inside_a_text():
    arguments = Dry.Arguments(sequence_breakers=("\n", "ab"), breaker_ids=[7])
    prepared = prepare(Dry, arguments, tokenizer=Letters())
    assert (prepared.sequence_breakers, prepared.breaker_ids) == ((), [7, 10, 98])


def test_breakers_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"sequence_breakers: '\\n' needs a tokenizer"):
        prepare(Dry, Dry.Arguments())
    assert prepare(Dry, Dry.Arguments(sequence_breakers=(), breaker_ids=[3])).breaker_ids == [3]
