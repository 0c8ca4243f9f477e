"""A fake engine that answers with given deltas, and a reader of typed server-sent events."""

import contextlib
import dataclasses
import json

import msgspec

from hardpoint.plugins import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
from hardpoint.plugins.requests import ToolCall
from support.fake_engine import FakeEngine


def call(index, id=None, name=None, arguments="", content_before=0):
    """Return a part of a call of a tool."""
    return ToolCall(
        index=index, id=id, name=name, arguments=arguments, content_before=content_before
    )


@dataclasses.dataclass
class DeltaEngine(FakeEngine):
    """Answers with these deltas, each the fields of a completion; without a stream, joined.

    Without deltas, it answers as a FakeEngine.

    Attributes:
        deltas: deltas of the answer; `tokens` of each are texts of tokens.
        num_cached: prompt tokens that were cached.
    """

    deltas: tuple = ()
    num_cached: int = 0

    def _outputs(self, text, ids, params, request_id):
        if not self.deltas:
            yield from super()._outputs(text, ids, params, request_id)
            return
        deltas = list(self.deltas)
        if params.output_kind is not RequestOutputKind.DELTA:
            deltas = [_joined(deltas)]
        for index, fields in enumerate(deltas):
            tokens = fields.get("tokens", ("?",))
            shown = {name: value for name, value in fields.items() if name != "tokens"}
            calls = [copied(part) for part in shown.pop("tool_calls", None) or ()]
            completion = CompletionOutput(
                index=0,
                text="".join(tokens),
                token_ids=list(range(100, 100 + len(tokens))),
                tool_calls=calls or None,
                **shown,
            )
            if params.logprobs is not None:
                completion.logprobs = [
                    {100 + i: Logprob(-0.5, 1, token), 7: Logprob(-1.5, 2, "other")}
                    for i, token in enumerate(tokens)
                ]
            yield RequestOutput(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=ids,
                outputs=[completion],
                finished=index == len(deltas) - 1,
                num_cached_tokens=self.num_cached,
            )


@contextlib.contextmanager
def answering(server, **attributes):
    """Change attributes of a server's engine while the body runs."""
    engine = server.engine
    before = {name: getattr(engine, name) for name in attributes}
    for name, value in attributes.items():
        setattr(engine, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(engine, name, value)


def copied(part):
    """Return an equal part of a call, which no other caller changes."""
    return msgspec.structs.replace(part)


def _joined(deltas):
    """Return the fields of the whole answer."""
    whole = {"tokens": []}
    calls = {}
    for fields in deltas:
        before = len(whole.get("content", ""))
        whole["tokens"] += fields.get("tokens", ("?",))
        for name, value in fields.items():
            if name in ("reasoning", "content"):
                whole[name] = whole.get(name, "") + (value or "")
            elif name not in ("tokens", "tool_calls"):
                whole[name] = value
        for part in fields.get("tool_calls") or ():
            if part.index in calls:
                calls[part.index].arguments += part.arguments
            else:
                calls[part.index] = copied(part)
                calls[part.index].content_before += before
    void = whole.pop("void_calls", ())
    return {**whole, "tool_calls": [call for index, call in calls.items() if index not in void]}


def typed_events(server, path, body, **kwargs):
    """Return the events of a stream; each one's name is the `type` in its data."""
    with server.client.stream("POST", path, json=body, **kwargs) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return typed_events_of(response.read().decode())


def typed_events_of(text):
    """Return the events in the text of a stream."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
