import pytest
import torch
from acme_sampling.xtc import Position, Xtc, coin
from by_hand import Letters, Rows, build, prepare, request_of

PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]])


def xtc():
    return build(Xtc, "xtc", vocab_size=5)


def kept(processor, *requests, probs=PROBS):
    """Return the tokens that each row keeps."""
    logits = probs.log().repeat(len(requests), 1)
    result = processor.apply(logits, Rows(processor, *requests))
    return [(row > -torch.inf).nonzero().flatten().tolist() for row in result]


@pytest.mark.parametrize(
    ("threshold", "tokens"),
    [
        (0.05, [3, 4]),
        (0.1, [2, 3, 4]),
        (0.25, [1, 2, 3, 4]),
        (0.35, [0, 1, 2, 3, 4]),
        (0.9, [0, 1, 2, 3, 4]),
    ],
)
def test_all_top_choices_but_the_least_likely_go(threshold, tokens):
    it = xtc()
    assert kept(it, request_of(it, threshold=threshold, probability=1.0)) == [tokens]


def test_equally_likely_top_choices_stay_together():
    it = xtc()
    probs = torch.tensor([[0.4, 0.25, 0.25, 0.06, 0.04]])
    assert kept(it, request_of(it, probability=1.0), probs=probs) == [[1, 2, 3, 4]]


def test_probability_zero_does_nothing():
    it = xtc()
    requests = [request_of(it, output=[0] * n, probability=0.0) for n in range(8)]
    assert kept(it, *requests) == [[0, 1, 2, 3, 4]] * 8


def test_nothing_goes_where_a_protected_token_would():
    it = xtc()
    free = request_of(it, probability=1.0, protected=[2, 4])
    held = request_of(it, probability=1.0, protected=[4, 1])
    assert kept(it, free, held, free) == [[2, 3, 4], [0, 1, 2, 3, 4], [2, 3, 4]]


def test_it_acts_as_often_as_asked():
    coins = [coin(Position(seed, 0, output)) for seed in range(20) for output in range(100)]
    assert all(0 <= value < 1 for value in coins)
    for probability in (0.1, 0.5, 0.9):
        share = sum(value < probability for value in coins) / len(coins)
        assert abs(share - probability) < 0.04


def test_the_coin_depends_on_seed_completion_and_position():
    assert coin(Position(7, 0, 3)) == coin(Position(7, 0, 3))
    places = [Position(7, 0, 3), Position(8, 0, 3), Position(7, 1, 3), Position(7, 0, 4)]
    assert len({coin(place) for place in [*places, Position(-1, 0, 3)]}) == 5


def test_the_coin_is_the_same_after_preemption_and_for_drafts():
    it = xtc()
    begun = it.start(request_of(it, seed=7, child_index=2))
    for token in (4, 4, 4):
        begun = it.advance(it.fork(begun), token)
    assert begun == it.start(request_of(it, output=[4, 4, 4], seed=7, child_index=2))


def test_a_row_is_the_same_alone_and_in_company():
    it = xtc()
    requests = [request_of(it, output=[0] * n, seed=n) for n in range(16)]
    together = kept(it, *requests)
    assert together == [kept(it, request)[0] for request in requests]
    assert [0, 1, 2, 3, 4] in together
    assert [2, 3, 4] in together


def test_line_breaks_and_stop_tokens_are_protected():
    arguments = prepare(Xtc, Xtc.Arguments(protected=[3]), tokenizer=Letters(), stop=[2, 200])
    assert arguments.protected == [3, 2, 10]
    assert prepare(Xtc, Xtc.Arguments(), stop=[2]).protected == [2]


def test_protected_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"protected: expected token ids under 100 .*, got 100"):
        prepare(Xtc, Xtc.Arguments(protected=[100]))
