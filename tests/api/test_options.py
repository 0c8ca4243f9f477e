"""Keyword arguments of calls: the same in every place that states them, checked, and documented."""

from __future__ import annotations

import inspect
import pydoc
from typing import Unpack

import pytest

from hardpoint import LLM
from hardpoint.async_llm import AsyncLLM
from hardpoint.calls.debug import AsyncDebugGroup, DebugGroup
from hardpoint.calls.model import AsyncModelGroup, ModelGroup
from hardpoint.chat import Chat
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins.request_options import (
    ChatOptions,
    ChatRequestOptions,
    RequestOptions,
)
from hardpoint.requests import BatchOptions, GenerateOptions, takes_options
from hardpoint.typed.describing import attribute_docs

REQUEST = set(RequestOptions.__annotations__)
CHAT = set(ChatOptions.__annotations__)
DISPLAY = {"use_tqdm"}
CALLS = {
    LLM.generate: REQUEST | DISPLAY,
    LLM.stream: REQUEST,
    LLM.chat: CHAT | REQUEST | DISPLAY,
    LLM.stream_chat: CHAT | REQUEST,
    ModelGroup.apply_chat_template: CHAT,
    DebugGroup.trace: REQUEST,
    AsyncLLM.generate: REQUEST,
    AsyncLLM.chat: CHAT | REQUEST,
    AsyncModelGroup.apply_chat_template: CHAT,
    AsyncDebugGroup.trace: REQUEST,
}
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)


def test_an_option_is_known_wherever_it_is_taken():
    assert set(BatchOptions.__annotations__) == REQUEST
    assert set(RequestExtras.__struct_fields__) >= REQUEST
    assert set(inspect.signature(Chat).parameters) == CHAT
    assert set(ChatRequestOptions.__annotations__) == CHAT | REQUEST


def test_every_option_is_documented():
    for options in (RequestOptions, ChatOptions):
        assert list(attribute_docs(options)) == list(options.__annotations__)
    assert set(attribute_docs(GenerateOptions)) == DISPLAY


@each_call
def test_a_wrong_keyword_is_an_error_of_the_call_itself(call):
    with pytest.raises(TypeError) as error:
        call(None, "Hi", tolls=[])
    name = call.__qualname__
    assert str(error.value).startswith(f"{name}() got an unexpected keyword argument 'tolls'")
    assert ("(did you mean 'tools'?)" in str(error.value)) is ("tools" in CALLS[call])


@each_call
def test_keywords_of_other_calls_are_wrong_ones(call):
    for name in sorted((CHAT | REQUEST | DISPLAY | {"options"}) - CALLS[call]):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call(None, "Hi", **{name: None})


@each_call
def test_help_and_completion_know_every_keyword(call):
    kinds = {name: p.kind for name, p in inspect.signature(call).parameters.items()}
    keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    assert set(keywords) == CALLS[call]
    assert inspect.Parameter.VAR_KEYWORD not in kinds.values()
    shown = pydoc.plain(pydoc.render_doc(call))
    for name in keywords:
        assert f"\n        {name}: " in shown


def test_positional_arguments_and_missing_ones_are_as_python_has_them():
    class Calls:
        @takes_options
        def generate(self, prompt, request_id=None, **options: Unpack[RequestOptions]):
            """Return the arguments it is given."""
            return prompt, request_id, options

    calls = Calls()
    assert calls.generate("Hi", "7", priority=1) == ("Hi", "7", {"priority": 1})
    assert calls.generate(prompt="Hi", request_id="7") == ("Hi", "7", {})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompt'"):
        calls.generate(priority=1)
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments but 4 were given"):
        calls.generate("Hi", "7", 1)
