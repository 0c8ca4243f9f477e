"""Positions of `part_arrays`: those that are computed; others end the request by name."""

from __future__ import annotations

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.testing import EOS, scripted_config, write_scripted_model

PART = "support.plugins.numbering:Numbering"
DRAFTS = "hardpoint.testing:ScriptedDrafts"
REPLY = "abcdefgh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("model"), {"say": REPLY})


def opened(folder, counts, **tables):
    enabled = [PART, *tables.pop("enable", ())]
    options = {"numbering": {"counts": counts}, **tables.pop("plugin", {})}
    config = {"plugins": {"enable": enabled}, "plugin": options, **tables}
    return LLM(config=scripted_config(folder, config))


def asking(max_tokens, **fields):
    return SamplingParams(max_tokens=max_tokens, temperature=0, include=["numbering"], **fields)


CASES = {
    "": {},
    "in chunks": {"scheduler": {"max_num_batched_tokens": 2}},
    "ahead": {"scheduler": {"asynchronous": True}},
    "preempted": {"kv_cache": {"block_size": 4, "num_blocks": 7}, "max_model_len": 24},
}


@pytest.mark.parametrize("case", CASES)
def test_every_computed_position_is_given_once(folder, case):
    with opened(folder, "computed", **CASES[case]) as llm:
        outputs = llm.generate(["say", "said", "saw"], asking(8, ignore_eos=True))
        assert (llm.engines.scheduler_stats().num_preemptions > 0) == (case == "preempted")
        for output in outputs:
            completion = output.outputs[0]
            assert completion.error is None
            found = completion.part_arrays["numbering"]["number"]
            assert [*found.positions] == [*range(len(output.prompt_token_ids) + 7)]
            assert [*found.values] == [10 * position for position in found.positions]


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [ord("c")]}, {"stop": ["cd"]}])
def test_accepted_drafts_after_the_end_are_left_out(folder, fields):
    with opened(folder, "computed") as llm:
        tokens, reply = llm.tokenizer.encode("say"), [*llm.tokenizer.encode(REPLY), EOS]
    options = {"scripted_drafts": {"replies": [[tokens, reply]], "count": 4}}
    with opened(folder, "computed", enable=[DRAFTS], plugin=options) as llm:
        (output,) = llm.generate(["say"], asking(20, **fields))
        completion = output.outputs[0]
        assert completion.error is None
        assert llm.engines.scheduler_stats().num_accepted_drafts > 0
        found = completion.part_arrays["numbering"]["number"]
        known = len(tokens) + len(completion.token_ids)
        assert [*found.positions] == [*range(known - 1)]


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
@pytest.mark.parametrize("case", ["", "ahead"])
def test_a_token_that_is_not_computed_has_no_position(folder, max_tokens, case):
    with opened(folder, "sampled", **CASES[case]) as llm:
        (output,) = llm.generate(["say"], asking(max_tokens))
        length = len(output.prompt_token_ids)
        completion = output.outputs[0]
        assert completion.finish_reason == "error"
        assert completion.error.startswith(f"plugin 'numbering' ({PART}")
        assert completion.error.endswith(
            f"its arrays() gave position {length} as 'number', expected positions in "
            f"0..{length - 1}, which are computed; the token that was sampled last is not: its "
            f"position is {length}, and the next step computes it"
        )
        (other,) = llm.generate(["say"], SamplingParams(max_tokens=2, temperature=0))
        assert other.outputs[0].finish_reason == "length"


def test_positions_begin_at_0(folder):
    with opened(folder, "before") as llm:
        (output,) = llm.generate(["say"], asking(2))
        assert "its arrays() gave position -1 as 'number'" in output.outputs[0].error
