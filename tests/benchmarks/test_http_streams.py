"""The client of the load scripts tells whole answers from errors, however they are framed."""

from __future__ import annotations

import asyncio

import pytest
from http_streams import Client
from support.fake_api_server import Answer, FakeServer, serving

BODY = {"model": "fake", "prompt": "a b", "stream": True}


def send(server, *, path="/v1/completions", body=BODY, timeout=60.0, count=1):
    async def run():
        client = Client(server.url)
        timelines = [await client.send(path, body, timeout) for _ in range(count)]
        await client.close()
        return timelines

    return asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        Answer(),
        Answer(framing="length"),
        Answer(framing="close"),
        Answer(close=True),
        Answer(newline="\r\n"),
        Answer(pieces=3),
        Answer(pieces=1, framing="close"),
    ],
    ids=str,
)
@pytest.mark.parametrize("body", [BODY, {"messages": [{"content": "a"}]}], ids=["text", "chat"])
def test_whole_answers(answer, body):
    with serving(FakeServer(lambda number, body: answer)) as server:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        first, second = send(server, path=path, body=body, count=2)
        stays_open = answer.framing != "close" and not answer.close
        assert server.connections == (1 if stays_open else 2)
    for timeline in (first, second):
        assert timeline.error == ""
        assert timeline.text == "né0 né1 né2 né3 "
        assert (timeline.chunks, len(timeline.gaps), timeline.output_tokens) == (4, 3, 4)
        assert timeline.sent <= timeline.first <= timeline.last <= timeline.ended


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(status=429, body='{"error": {"message": "too many"}}'), "429 too many"),
        (Answer(status=500, body="{}"), "500 {}"),
        (Answer(fault="the plugin failed"), "stream: the plugin failed"),
        (Answer(cut=2), "connection: RemoteProtocolError"),
        (Answer(cut=2, framing="close"), "stream: ended without a finish_reason and [DONE]"),
        (Answer(marker=False), "stream: ended without a finish_reason and [DONE]"),
        (Answer(finish=False), "stream: ended without a finish_reason and [DONE]"),
    ],
    ids=str,
)
def test_errors(answer, error):
    def choose(number, body):
        return answer if number == 0 else Answer()

    with serving(FakeServer(choose)) as server:
        first, second = send(server, count=2)
    assert (first.error, second.error) == (error, "")


def test_an_answer_that_takes_too_long():
    with serving(FakeServer(lambda number, body: Answer(first=60.0))) as server:
        (timeline,) = send(server, timeout=0.05)
    assert timeline.error == "timeout after 0.05 s"


def test_no_server():
    with serving(FakeServer()) as server:
        pass
    (timeline,) = send(server)
    assert timeline.error == "connection: ConnectError"
