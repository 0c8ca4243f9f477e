"""Messages to callers of LLM, and calls that are open side by side."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
from support.internals import open_calls_of

from hardpoint import LLM, LLMEngine, RequestError, SamplingParams
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def live(llm):
    return llm.engines.scheduler_stats().num_running + llm.engines.scheduler_stats().num_waiting


class TestUnordered:
    def test_outputs_come_once_each_when_they_are_finished(self, llm):
        requests = [("say abc", LONG if index == 1 else GREEDY) for index in range(9)]
        found = list(llm.generate_unordered(requests))
        assert sorted(position for position, _ in found) == list(range(9))
        assert found[-1][0] == 1
        texts = {position: output.outputs[0].text for position, output in found}
        assert texts.pop(1).startswith(" abc abc")
        assert set(texts.values()) == {" abc abc abc"}

    def test_a_refused_prompt_does_not_end_the_others(self, llm):
        requests = [("say abc", GREEDY), ("", GREEDY), ([10**9], None), ("say abc", GREEDY)]
        found = dict(llm.generate_unordered(requests))
        assert str(found[1]).startswith("prompt: ")
        assert "10" in str(found[2])
        assert found[0].outputs == found[3].outputs
        assert list(llm.generate_unordered([])) == []

    def test_prompts_are_taken_when_there_is_room(self, scripted):
        taken = []

        def requests():
            for number in range(1000):
                taken.append(number)
                yield "say abc", GREEDY

        with LLM(config=scripted_config(scripted, {"scheduler": {"max_num_seqs": 4}})) as llm:
            outputs = llm.generate_unordered(requests())
            next(outputs)
            assert len(taken) == 8
            outputs.close()
            assert live(llm) == 0

    @pytest.mark.parametrize("in_process", [True, False])
    def test_a_slow_iterable_delays_no_output(self, scripted, in_process):
        answered = threading.Event()

        def requests():
            yield "say abc", GREEDY
            assert answered.wait(60)
            yield "say abc", GREEDY

        config = scripted_config(scripted, {"engine": {"in_process": in_process}})
        with LLM(config=config) as llm:
            outputs = llm.generate_unordered(requests())
            assert next(outputs)[0] == 0
            answered.set()
            assert [position for position, _ in outputs] == [1]

    def test_a_late_prompt_joins_those_that_run(self, llm, monkeypatch):
        steps, step = itertools.count(), llm.llm_engine.step
        runs = threading.Event()

        def watched():
            if next(steps) == 3:
                runs.set()
            return step()

        def requests():
            yield "say abc", LONG
            assert runs.wait(60)
            yield "say abc", GREEDY

        monkeypatch.setattr(llm.llm_engine, "step", watched)
        assert [position for position, _ in llm.generate_unordered(requests())] == [1, 0]

    def test_an_error_of_the_iterable_is_raised(self, llm):
        def requests():
            yield "say abc", LONG
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            list(llm.generate_unordered(requests()))
        assert live(llm) == 0

    @pytest.mark.parametrize("in_process", [True, False])
    def test_a_full_scheduler_is_waited_for(self, scripted, in_process):
        extra = {"scheduler": {"max_num_seqs": 4, "max_waiting": 2}}
        extra |= {"engine": {"in_process": in_process}}
        with LLM(config=scripted_config(scripted, extra)) as llm:
            found = list(llm.generate_unordered([("say abc", GREEDY)] * 20))
            assert sorted(position for position, _ in found) == list(range(20))
            assert {output.outputs[0].text for _, output in found} == {" abc abc abc"}

    def test_a_conversation_can_be_a_prompt(self, llm):
        prompt = llm.model.apply_chat_template([{"role": "user", "content": "say abc"}])
        assert llm.tokenizer.decode(prompt["prompt_token_ids"]) == prompt["prompt"]
        ((_, output),) = llm.generate_unordered([(prompt, GREEDY)])
        (answer,) = llm.chat([{"role": "user", "content": "say abc"}], GREEDY)
        assert output.outputs == answer.outputs


class TestStream:
    def test_it_runs_beside_other_calls(self, llm):
        (whole,) = llm.generate("emoji", LONG)
        tokens = []
        for output in llm.stream("emoji", LONG):
            tokens += output.outputs[0].token_ids
            assert llm.generate(["say abc"] * 3, GREEDY)[2].outputs[0].text == " abc abc abc"
            if len(tokens) > 20:
                break
        assert tokens == whole.outputs[0].token_ids[: len(tokens)]
        assert live(llm) == 0

    def test_wrong_arguments_are_refused_at_once(self, llm):
        with pytest.raises(RequestError, match="prompt"):
            llm.stream("")
        with pytest.raises(
            RequestError, match="sampling_params: expected SamplingParams, got dict"
        ):
            llm.stream("say abc", {"temperature": 0})
        with pytest.raises(RequestError, match="priority: expected a whole number"):
            llm.stream("say abc", priority="high")
        assert live(llm) == 0

    def test_closing_it_ends_the_request(self, llm):
        stream = llm.stream("say abc", LONG)
        next(stream)
        assert live(llm) == 1
        stream.close()
        stream.close()
        assert live(llm) == 0
        assert list(stream) == []

    def test_so_does_losing_it(self, llm):
        stream = llm.stream("say abc", LONG)
        next(stream)
        del stream
        gc.collect()
        assert live(llm) == 0

    def test_it_takes_what_generate_takes(self, llm):
        (last,) = [o for o in llm.stream("say abc", LONG, timeout=1e-9) if o.finished]
        assert last.outputs[0].finish_reason == "timeout"

    def test_one_that_outlives_its_engine_harms_nobody(self, scripted):
        llm = LLM(config=scripted_config(scripted))
        stream = llm.stream("say abc", LONG)
        next(stream)
        llm.close()
        stream.close()


class TestChat:
    MESSAGES = ({"role": "user", "content": "say abc"},)

    def test_its_text_is_the_prompt(self, llm):
        (output,) = llm.chat(list(self.MESSAGES), GREEDY, tags={"tenant": "acme"})
        assert output.prompt == "user: say abc\nassistant: "
        assert llm.tokenizer.decode(output.prompt_token_ids) == output.prompt

    @pytest.mark.parametrize(("wrong", "got"), [(MESSAGES[0], "dict"), ("say abc", "str")])
    def test_what_is_no_list_is_refused(self, llm, wrong, got):
        words = f"messages: expected a list of messages, or a list of such lists, got a {got}"
        with pytest.raises(RequestError, match=words):
            llm.chat(wrong)


def test_the_engine_can_be_stepped_by_hand(llm):
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    engine.add_request("mine", "say abc", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert (
        "".join(output.outputs[0].text for output in outputs if output.finished) == " abc abc abc"
    )


def test_finding_an_output_costs_the_same_however_many_prompts_there_are(llm):
    """Outputs are looked for where some came, not in every queue of every call."""
    looked = []

    class Watched(dict):
        def __getitem__(self, key):
            looked.append(key)
            return super().__getitem__(key)

    calls = open_calls_of(llm)
    plain, calls._outputs = calls._outputs, Watched()
    try:
        llm.generate(["x"] * 200, SamplingParams(temperature=0.0, max_tokens=1))
    finally:
        calls._outputs = plain
    assert len(looked) <= 2 * 200 + 10
