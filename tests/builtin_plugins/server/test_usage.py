"""The usage of answers: counted as outputs come."""

import asyncio

from support.fake_engine import FakeTokenizer

from hardpoint.builtin_plugins.server.routes.answers import UsageCount
from hardpoint.plugins import CompletionOutput, RequestOutput


def output(tokens, prompt=(1, 2, 3), cached=None, **fields):
    completion = CompletionOutput(index=0, text="", token_ids=[7] * tokens)
    for name, value in fields.items():
        setattr(completion, name, value)
    return RequestOutput(
        request_id="0",
        prompt="",
        prompt_token_ids=list(prompt),
        outputs=[completion],
        finished=False,
        num_cached_tokens=cached,
    )


class NeverEncodes(FakeTokenizer):
    def encode(self, text, *, add_special_tokens=True):
        raise AssertionError("it encodes")


def test_tokens_of_reasoning_are_no_more_than_all_and_are_counted_elsewhere():
    count = UsageCount(NeverEncodes())
    count.add(output(5, reasoning="many letters", content="yes"))
    reasoning_requests = []

    async def encode(text, **kwargs):
        reasoning_requests.append((text, kwargs))
        return [0] * len(text)

    asyncio.run(count.measure(encode))
    assert reasoning_requests == [("many letters", {"add_special_tokens": False})]
    assert count.usage().completion_tokens_details.reasoning_tokens == 5


def test_without_measuring_the_tokenizer_counts():
    count = UsageCount(FakeTokenizer())
    count.add(output(50, reasoning="many letters", content="yes"))
    assert count.usage().completion_tokens_details.reasoning_tokens == len("many letters")
    assert count.usage().completion_tokens_details.reasoning_tokens == len("many letters")


def test_each_prompt_counts_once():
    count = UsageCount(NeverEncodes())
    for number, prompt in ((0, [1, 2]), (1, [1, 2, 3]), (0, [1, 2])):
        count.add(output(1, prompt, cached=None), number)
    count.add(output(1, [1, 2], cached=2), 0)
    count.add(output(1, [1, 2, 3], cached=1), 1)
    count.add(output(1, [1, 2], cached=2), 0)
    usage = count.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert usage.prompt_tokens_details.cached_tokens == 3
