"""The default of `max_tokens`: 16 for prompts, the rest of the context for messages."""

import copy
import pickle

import pytest

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "0123456789" * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("m"))
    with LLM(config=scripted_config(folder)) as llm:
        prompt = llm.model.apply_chat_template(MESSAGES)["prompt"]
    return write_scripted_model(folder, {prompt: ANSWER, "say": ANSWER})


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(config=scripted_config(folder)) as llm:
        yield llm


def length(output) -> int:
    return len(output.outputs[0].text)


@pytest.mark.parametrize(
    ("params", "of_prompt", "of_messages"),
    [
        (None, 16, 50),
        (SamplingParams(temperature=0.0), 16, 50),
        (copy.deepcopy(SamplingParams()), 16, 50),
        (pickle.loads(pickle.dumps(SamplingParams())), 16, 50),
        (SamplingParams(max_tokens=16), 16, 16),
        (SamplingParams(max_tokens=20), 20, 20),
        (SamplingParams(max_tokens=None), 50, 50),
    ],
)
def test_lengths(llm, params, of_prompt, of_messages):
    assert length(llm.generate("say", params)[0]) == of_prompt
    assert length(llm.chat(MESSAGES, params)[0]) == of_messages
    assert [length(o) for o in llm.chat([MESSAGES] * 2, [params] * 2)] == [of_messages] * 2
    streamed = "".join(o.outputs[0].text for o in llm.stream_chat(MESSAGES, params))
    assert len(streamed) == of_messages


async def test_lengths_of_an_async_llm(folder):
    async with AsyncLLM(config=scripted_config(folder)) as llm:
        *_, last = [output async for output in llm.chat(MESSAGES, SamplingParams(temperature=0.0))]
        assert length(last) == 50
        *_, last = [output async for output in llm.generate("say", SamplingParams())]
        assert length(last) == 16


def test_the_default_is_shown_as_a_number():
    assert SamplingParams().max_tokens == 16
    assert SamplingParams() == SamplingParams(max_tokens=16)
    assert "max_tokens=16," in repr(SamplingParams())


@pytest.mark.parametrize(("role", "hint"), [("usr", " (did you mean 'user'?)"), ("banana", "")])
def test_an_unknown_role(llm, role, hint):
    with pytest.raises(RequestError) as error:
        llm.chat([*MESSAGES, {"role": role, "content": "x"}])
    known = '"system", "developer", "user", "assistant", "tool"'
    assert str(error.value) == f"messages[1].role: expected one of {known}, got {role!r}{hint}"
