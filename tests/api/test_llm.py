"""LLM: what an embedding program sees."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
import sys
import weakref

import numpy as np
import pytest
from support.internals import core_of, open_calls_of, worker_of
from support.process.harness import process_config
from support.process.slow_requests import SLOW, UNFINISHED

from hardpoint import (
    LLM,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint import progress as progress_display
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
HI = [{"role": "user", "content": "hi"}]
CALLS = (
    lambda llm: llm.generate("x"),
    lambda llm: llm.stream("x"),
    lambda llm: llm.chat(HI),
    lambda llm: llm.stream_chat(HI),
    lambda llm: llm.model.apply_chat_template(HI),
    lambda llm: llm.open_conversation(),
)


def text(output) -> str:
    return output.outputs[0].text


def test_results_come_in_the_order_asked(llm):
    prompts = ["say abc", "emoji", "long", "say abc"]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (20, 9, 30, 3)]
    outputs = llm.generate(prompts, params)
    assert [text(o) for o in outputs] == [" abc abc abc", "go 😀 on"[:6], "0123456789" * 3, " ab"]
    assert [o.prompt for o in outputs] == prompts
    assert [o.finished for o in outputs] == [True] * 4


class Writes:
    """A stand-in for a stream, as programs with windows have it; no more than `write`."""

    def write(self, text: str) -> None:
        raise AssertionError(text)


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    ("stream", "progress"),
    [(None, None), (None, True), (closed(), None), (closed(), True), (Writes(), None)],
    ids=["none", "none-drawn", "closed", "closed-drawn", "stand-in"],
)
def test_it_answers_without_a_standard_error(scripted, monkeypatch, stream, progress):
    monkeypatch.setattr(sys, "stderr", stream)
    with LLM(config=scripted_config(scripted), progress=progress) as llm:
        assert text(llm.generate("say abc", GREEDY)[0]) == " abc abc abc"


def test_a_terminal_that_goes_away_ends_the_progress_alone(scripted, monkeypatch):
    with open("/dev/full", "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        with LLM(config=scripted_config(scripted), progress=True) as llm:
            assert text(llm.generate("say abc", GREEDY)[0]) == " abc abc abc"
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            gone.close()


@pytest.mark.parametrize("module", ["ipykernel.iostream", __name__], ids=["notebook", "dumb"])
def test_progress_is_plain_lines_where_no_cursor_moves(scripted, monkeypatch, module):
    class Stream(io.StringIO):
        def isatty(self):
            return module == __name__

    Stream.__module__ = module
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb" if module == __name__ else "xterm")
    monkeypatch.setattr(progress_display, "_SECONDS_PER_LINE", 0.0)
    with LLM(config=scripted_config(scripted)) as llm:
        llm.generate("say abc", GREEDY)
    last = stream.getvalue().splitlines()[-1]
    assert re.fullmatch(r"Generating: 1/1, \d+ prompt, \d+ output tokens/s", last)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", stream.getvalue())


@pytest.mark.parametrize("of_llm", [True, False])
@pytest.mark.parametrize("of_call", [True, False, None])
def test_each_call_may_show_progress_or_not(scripted, monkeypatch, of_llm, of_call):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_display, "_SECONDS_PER_LINE", 0.0)
    with LLM(config=scripted_config(scripted), progress=of_llm) as llm:
        for call, given in (
            (llm.generate, "say abc"),
            (llm.chat, [{"role": "user", "content": "hi"}]),
        ):
            stream.truncate(0)
            call(given, GREEDY, use_tqdm=of_call)
            is_shown = of_llm if of_call is None else of_call
            assert ("Generating: 1/1" in stream.getvalue()) == is_shown
        with pytest.raises(RequestError, match="use_tqdm: expected true, false or None, got 1"):
            llm.generate("say abc", GREEDY, use_tqdm=1)


def test_one_prompt_may_stand_alone(llm):
    for prompt in ("say abc", {"prompt": "say abc"}, llm.tokenizer.encode("say abc")):
        (output,) = llm.generate(prompt, GREEDY)
        assert text(output) == " abc abc abc"


def test_nothing_asked_nothing_done(llm):
    assert llm.generate([]) == []


def test_one_of_each_per_prompt(llm):
    with pytest.raises(RequestError, match="sampling_params: expected one or 2, one per prompt, g"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="sampling_params: expected one or 2, one per prompt, g"):
        llm.generate(["a", "b"], [])
    with pytest.raises(RequestError, match="priority: expected one or 1, one per prompt, got 2"):
        llm.generate("a", GREEDY, priority=[1, 2])
    with pytest.raises(RequestError, match="prompts: expected a prompt or a list, got int"):
        llm.generate(3)


def test_a_refused_prompt_leaves_none_of_them_behind(llm):
    with pytest.raises(RequestError, match="empty prompt"):
        llm.generate(["say abc", "", "long"], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert text(llm.generate("say abc", GREEDY)[0]) == " abc abc abc"


def test_streams_and_calls_side_by_side(llm):
    """Outputs go to the call that asked, however calls interleave."""
    first, second = llm.stream("say abc", GREEDY), llm.stream("emoji", GREEDY)
    texts = ["", ""]
    inside = []
    for step in range(40):
        for index, stream in enumerate((first, second)):
            for output in [next(stream, None)]:
                texts[index] += text(output) if output else ""
        if step == 2:
            inside = llm.generate(["say abc", "emoji"], GREEDY)
    assert texts == [" abc abc abc", "go 😀 on"]
    assert [text(output) for output in inside] == texts
    assert len(open_calls_of(llm)) == 0


def test_leaving_a_stream_early_aborts_it(llm):
    for _ in llm.stream("long", GREEDY):
        break
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(open_calls_of(llm)) == 0


def test_streamed_kinds(llm):
    final = SamplingParams(temperature=0.0, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
    (only,) = llm.stream("say abc", final)
    assert text(only) == " abc abc abc"


def test_chat(llm):
    assert text(llm.chat(HI, GREEDY)[0]) == "hello"
    assert [text(o) for o in llm.chat([HI, HI], GREEDY)] == ["hello", "hello"]
    assert "".join(text(o) for o in llm.stream_chat(HI, GREEDY)) == "hello"


def test_numbers_of_numpy_are_numbers(llm):
    params = SamplingParams(temperature=np.float32(0.0), max_tokens=np.int64(4))
    assert text(llm.generate("say abc", params)[0]) == " abc"
    with pytest.raises(RequestError, match="expected plain data: a builtins.object cannot"):
        llm.generate("x", SamplingParams(plugin_args={"min_p": object()}))


def test_whole_numbers_fit_a_tensor(llm):
    with pytest.raises(RequestError, match="top_k: expected a whole number <= 2147483647, got"):
        llm.generate("x", SamplingParams(top_k=2**63))


def test_min_tokens_must_fit_what_is_left(llm):
    with pytest.raises(RequestError, match="min_tokens: expected at most 12, the room that the"):
        llm.generate([[1] * 500], SamplingParams(min_tokens=50, max_tokens=None))


def test_closing_lets_go_of_everything(scripted):
    llm = LLM(config=scripted_config(scripted))
    llm.generate("say abc", GREEDY)
    core = core_of(llm.llm_engine)
    held = [weakref.ref(core), weakref.ref(worker_of(llm.llm_engine).runner.model)]
    del core
    llm.close()
    llm.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    for call in CALLS:
        with pytest.raises(EngineClosedError, match="^the engine is closed$"):
            call(llm)


def test_each_call_of_a_dead_engine_has_the_error_that_ended_it(scripted):
    with LLM(config=process_config(scripted, SLOW)) as llm:
        llm.chat(HI, GREEDY)
        stream = llm.stream("x", UNFINISHED)
        os.kill(llm.llm_engine.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            list(stream)
        for call in CALLS:
            with pytest.raises(EngineDeadError, match="was killed by signal 9"):
                call(llm)


def test_two_at_once(scripted):
    with LLM(config=scripted_config(scripted)) as one, LLM(config=scripted_config(scripted)) as two:
        assert text(one.generate("say abc", GREEDY)[0]) == text(two.generate("say abc", GREEDY)[0])
