"""Text, stop strings, output kinds and log-probabilities, through a whole engine."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter

import pytest
from support.driving import run
from support.internals import core_of, scheduler_of

from hardpoint import RequestOutputKind, SamplingParams
from hardpoint.builtin_plugins.tokenizer.transformers import TransformersTokenizer
from hardpoint.testing import EOS, scripted_engine

GREEDY = {"temperature": 0.0, "max_tokens": 100}


@pytest.fixture(scope="module")
def engine(scripted):
    engine = scripted_engine(scripted)
    yield engine
    engine.close()


def outputs_of(engine, prompt, **fields):
    """Every output of one request, as it was streamed."""
    engine.add_request("r", prompt, SamplingParams(**{**GREEDY, **fields}))
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    return seen


def last(engine, prompt, **fields):
    return outputs_of(engine, prompt, **fields)[-1].outputs[0]


def test_the_reply_of_the_script(engine):
    done = last(engine, "say abc")
    assert (done.text, done.finish_reason, done.stop_reason) == (" abc abc abc", "stop", None)
    assert done.token_ids[-1] == EOS


def test_cumulative_outputs_grow_and_deltas_join(engine):
    texts = [o.outputs[0].text for o in outputs_of(engine, "say abc")]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    deltas = outputs_of(engine, "say abc", output_kind=RequestOutputKind.DELTA)
    assert "".join(o.outputs[0].text for o in deltas) == texts[-1] == " abc abc abc"
    ids = [t for o in deltas for t in o.outputs[0].token_ids]
    assert ids == last(engine, "say abc").token_ids


def test_final_only_gives_one_output(engine):
    (only,) = outputs_of(engine, "say abc", output_kind=RequestOutputKind.FINAL_ONLY)
    assert only.finished
    assert only.outputs[0].text == " abc abc abc"


def test_characters_of_several_tokens_come_whole(engine):
    deltas = outputs_of(engine, "emoji", output_kind=RequestOutputKind.DELTA)
    pieces = [o.outputs[0].text for o in deltas]
    assert "".join(pieces) == "go 😀 on"
    assert all("\ufffd" not in piece for piece in pieces)
    cut = last(engine, "emoji", max_tokens=5)  # ends in the middle of the character
    assert cut.text == "go \ufffd"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("stop", "left"),
    [("345", "012"), (["345", "45"], "012"), (["45", "345"], "0123"), (["9", "34"], "012")],
)
def test_stop_strings_cut_the_text(engine, kind, stop, left):
    seen = outputs_of(engine, "long", stop=stop, output_kind=kind)
    texts = [o.outputs[0].text for o in seen]
    text = "".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]
    assert text == left
    assert seen[-1].outputs[0].finish_reason == "stop"
    assert seen[-1].outputs[0].stop_reason in stop
    assert not engine.has_unfinished_requests()


def test_stop_string_may_be_kept(engine):
    assert last(engine, "long", stop="345", include_stop_str_in_output=True).text == "012345"


def test_no_text_of_a_stop_string_is_ever_shown(engine):
    deltas = outputs_of(engine, "long", stop="56x", output_kind=RequestOutputKind.DELTA)
    shown = ""
    for output in deltas[:-1]:
        shown += output.outputs[0].text
        assert len(output.outputs[0].token_ids) >= 1
    assert shown + deltas[-1].outputs[0].text == "0123456789" * 8


def test_a_request_ended_by_a_stop_string_leaves_the_engine_empty(engine):
    last(engine, "long", stop="3")
    core = core_of(engine)
    cache = core._scheduler.context.kv_cache
    assert cache.num_free_blocks == cache.num_blocks


def test_stop_token_ids_and_ignore_eos(engine):
    stop = last(engine, "long", stop_token_ids=[last(engine, "long").token_ids[3]])
    assert (stop.text, stop.finish_reason) == ("012", "stop")
    assert stop.stop_reason == stop.token_ids[-1]
    assert (
        last(
            engine, "long", stop_token_ids=[stop.stop_reason], include_stop_str_in_output=True
        ).text
        == "0123"
    )
    on = last(engine, "say abc", ignore_eos=True, max_tokens=30)
    assert (len(on.token_ids), on.finish_reason) == (30, "length")
    assert EOS in on.token_ids


def test_special_tokens_in_the_text(engine):
    fields = {"ignore_eos": True, "max_tokens": 13, "skip_special_tokens": False}
    assert last(engine, "say abc", **fields).text == " abc abc abc<eos>"


def test_detokenize_off_gives_ids_alone(engine):
    done = last(engine, "say abc", detokenize=False)
    assert (done.text, len(done.token_ids)) == ("", 13)


def test_length_ends(engine):
    assert last(engine, "long", max_tokens=5).finish_reason == "length"
    full = last(engine, [1] * 500, max_tokens=None, ignore_eos=True)
    assert (len(full.token_ids), full.finish_reason) == (12, "length")  # 512 in all


def test_min_tokens_holds_back_every_stop_token(engine):
    first = last(engine, "say abc").token_ids
    done = last(engine, "say abc", min_tokens=20, stop_token_ids=[first[2]])
    assert len(done.token_ids) >= 20
    assert not {EOS, first[2]} & set(done.token_ids[:19])


def test_min_tokens_holds_back_stop_strings(engine):
    done = last(engine, "long", stop=["345", "9"], min_tokens=10)
    assert (done.text, done.stop_reason, len(done.token_ids)) == ("0123456789012", "345", 16)
    done = last(engine, "long", stop="345", min_tokens=5)  # its last token is the sixth
    assert (done.text, done.stop_reason) == ("012", "345")
    done = last(engine, "long", stop="345", min_tokens=6, include_stop_str_in_output=True)
    assert (done.text, len(done.token_ids)) == ("0123456789012345", 16)
    done = last(engine, "long", stop="345", plugin_args={"min_tokens": {"min_tokens": 6}})
    assert (done.text, len(done.token_ids)) == ("0123456789012", 16)
    done = last(engine, "long", stop="345", min_tokens=9, max_tokens=9)
    assert (done.text, done.finish_reason) == ("012345678", "length")


def test_logprobs_hold_the_chosen_token_and_the_likeliest(engine):
    done = last(engine, "x", logprobs=3, max_tokens=6, ignore_eos=True)
    assert len(done.logprobs) == 6
    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert len(entry) == 3  # greedy: the chosen one is the likeliest
        assert entry[token].rank == 1
        values = [item.logprob for item in entry.values()]
        assert values == sorted(values, reverse=True)
    pairs = zip(done.token_ids, done.logprobs, strict=True)
    total = sum(entry[token].logprob for token, entry in pairs)
    assert math.isclose(done.cumulative_logprob, total, rel_tol=1e-6)


@pytest.mark.parametrize("count", [None, 0, 2])
def test_logprobs_of_tokens_that_a_request_names(engine, count):
    """The chosen token, the likeliest, then those named; each as in the whole vocabulary's."""
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    whole = last(engine, "x", logprobs=-1, **sampling)
    named = [200, 3, 65, 200]
    done = last(engine, "x", logprobs=count, logprob_token_ids=named, **sampling)
    assert done.token_ids == whole.token_ids
    assert len(done.logprobs) == 6
    for token, entry, every in zip(done.token_ids, done.logprobs, whole.logprobs, strict=True):
        likeliest = sorted(every, key=lambda other: -every[other].logprob)[: count or 0]
        assert list(entry) == list(dict.fromkeys([token, *likeliest, *named]))
        assert all(entry[other].logprob == every[other].logprob for other in entry)
        assert {other: item.rank for other, item in entry.items() if item.rank is not None} == {
            other: every[other].rank for other in (token, *likeliest)
        }
    assert done.cumulative_logprob == whole.cumulative_logprob


def test_each_request_of_a_batch_names_tokens_of_its_own(engine):
    named = {"none": None, "one": [7], "four": [1, 2, 3, 256]}
    fields = {"seed": 1, "max_tokens": 5, "ignore_eos": True}
    alone = {
        name: last(engine, name, logprob_token_ids=ids, **fields) for name, ids in named.items()
    }
    for name, ids in named.items():
        params = SamplingParams(**{**GREEDY, **fields}, logprob_token_ids=ids)
        engine.add_request(name, name, params)
    together = {}
    while engine.has_unfinished_requests():
        together |= {output.request_id: output.outputs[0] for output in engine.step()}
    for name, ids in named.items():
        assert together[name].token_ids == alone[name].token_ids
        assert together[name].logprobs == alone[name].logprobs
        assert (together[name].logprobs is None) == (ids is None)


def test_logprobs_are_the_models_own(engine):
    """Whatever processors do, log-probabilities are of the logits as the model gave them."""
    token = last(engine, "x", max_tokens=1, logprobs=1, ignore_eos=True).token_ids[0]
    biased = last(
        engine, "x", max_tokens=1, logprobs=1, logit_bias={token: -100.0}, ignore_eos=True
    )
    assert biased.token_ids[0] != token
    assert next(iter(biased.logprobs[0])) == biased.token_ids[0]
    assert biased.logprobs[0][token].rank == 1
    assert biased.logprobs[0][biased.token_ids[0]].rank > 1


def test_whole_vocabulary_of_logprobs(engine):
    done = last(engine, "x", logprobs=-1, max_tokens=1, ignore_eos=True)
    assert len(done.logprobs[0]) == 257
    assert math.isclose(
        sum(math.exp(v.logprob) for v in done.logprobs[0].values()), 1, abs_tol=1e-4
    )


def test_logprobs_decode_each_token_of_a_request_once(scripted, monkeypatch):
    """One call for each entry stopped all streams for seconds, when prompts had many entries."""
    decoded = Counter()
    decode = TransformersTokenizer.decode

    def counted(self, token_ids, **kwargs):
        if not kwargs.get("skip_special_tokens", True):  # texts of answers leave them out
            decoded[tuple(token_ids)] += 1
        return decode(self, token_ids, **kwargs)

    monkeypatch.setattr(TransformersTokenizer, "decode", counted)
    with contextlib.closing(scripted_engine(scripted)) as engine:
        decoded.clear()
        done = last(engine, "say abc" * 9, prompt_logprobs=5, logprobs=5, max_tokens=20)
        assert len(done.logprobs) == 20
    assert decoded
    assert max(decoded.values()) == 1


def test_delta_logprobs_cover_the_new_part_only(engine):
    seen = outputs_of(engine, "x", logprobs=1, max_tokens=5, output_kind=RequestOutputKind.DELTA)
    assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in seen)


@pytest.mark.parametrize("budget", [7, 2048])
def test_prompt_logprobs(open_engine, budget):
    engine = open_engine({"scheduler": {"max_num_batched_tokens": budget}})
    prompt = list(range(10, 40))
    params = SamplingParams(prompt_logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY, **GREEDY)
    engine.add_request("r", prompt, params)
    engine.add_request("other", [5] * 20, SamplingParams(**GREEDY))
    found = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "r":
                found = output
    assert found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == 30
    for token, entry in zip(prompt[1:], found.prompt_logprobs[1:], strict=True):
        assert next(iter(entry)) == token
        assert 2 <= len(entry) <= 3


def test_several_completions_come_together_or_as_they_are(engine):
    params = {"temperature": 1.0, "seed": 1, "n": 3, "max_tokens": 4, "ignore_eos": True}
    (final,) = outputs_of(engine, "x", **params, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [c.index for c in final.outputs] == [0, 1, 2]
    seen = outputs_of(engine, "x", **params, output_kind=RequestOutputKind.DELTA)
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    for index in range(3):
        ids = [t for o in seen for c in o.outputs if c.index == index for t in c.token_ids]
        assert ids == final.outputs[index].token_ids


def test_abort_ends_a_request_and_frees_its_blocks(engine):
    engine.add_request("gone", "long", SamplingParams(n=2, **GREEDY))
    engine.add_request("stays", "say abc", SamplingParams(**GREEDY))
    engine.step()
    engine.abort_requests(["gone", "never seen"])
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert {o.request_id for o in seen} == {"stays"}
    assert seen[-1].outputs[0].text == " abc abc abc"
    cache = scheduler_of(engine).context.kv_cache
    assert cache.num_free_blocks == cache.num_blocks


def test_run_gives_every_result(engine):
    results = run(engine, [(f"r{i}", "say abc", SamplingParams(**GREEDY)) for i in range(5)])
    assert sorted(results) == [f"r{i}" for i in range(5)]
