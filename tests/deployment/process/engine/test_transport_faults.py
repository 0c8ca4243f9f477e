"""The threads beside the loop with wrong messages: senders of right ones are served."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from support.core.engine_harness import LoopRig, MidStep, ScriptedExecutor, expected, request
from support.core.io_harness import READY
from support.waiting import PATIENCE_S, wait_until

from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.host.system.encoding import Decoder
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, FinishReason
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.engine.sender import OutputEncoder
from hardpoint.process.engine.transport import EngineIO
from hardpoint.process.protocol import RequestType

ADD, ABORT, UTILITY = RequestType.ADD, RequestType.ABORT, RequestType.UTILITY
OUTSIDE = [100_000]  # of the vocabulary


@pytest.fixture
def held(serve):
    """A served loop in the middle of a step for the request "a"."""
    executor = ScriptedExecutor()
    step = MidStep(executor)
    served = serve(executor, clients=2)
    served.clients[0].send(ADD, request("a"))
    assert step.begun.wait(PATIENCE_S)
    yield served
    step.go_on.set()


class TestRefusals:
    """Requests that are wrong are answered by the thread that reads."""

    def test_they_do_not_wait_for_the_step(self, held):
        client, _ = held.clients
        client.send(ADD, request("bad", prompt=OUTSIDE))
        client.until(lambda: client.ends == {"bad": "error"})
        assert "expected token ids from 0 to 99999, got 100000" in client.errors["bad"]
        held.rig.executor.during.go_on.set()
        client.until(lambda: "a" in client.ends)
        assert client.tokens["a"] == expected([1, 2, 3], 4)

    def test_an_abort_behind_one_changes_nothing(self, held):
        client, _ = held.clients
        client.send(ADD, request("bad", prompt=OUTSIDE))
        client.send(ABORT, ["bad"])
        client.until(lambda: client.ends == {"bad": "error"})
        held.rig.executor.during.go_on.set()
        client.until(lambda: len(client.ends) == 2)
        assert client.ends == {"bad": "error", "a": "length"}
        before = client.messages
        assert not client.read(0.1)
        assert client.messages == before

    def test_a_live_request_of_the_same_id_goes_on(self, held, caplog):
        client, other = held.clients
        client.send(ADD, request("b"))  # not even seen by the loop
        for name in ("a", "b"):
            client.send(ADD, request(name, prompt=OUTSIDE))
        other.send(ADD, request("a", prompt=OUTSIDE, client_index=1))
        other.until(lambda: other.ends == {"a": "error"})
        wait_until(lambda: held.rig.queues.input.qsize() == 3)  # "b" and two that are wrong
        assert not client.read(0.1)
        held.rig.executor.during.go_on.set()
        client.until(lambda: len(client.ends) == 2)
        assert client.ends == {"a": "length", "b": "length"}
        assert client.tokens == {name: expected([1, 2, 3], 4) for name in "ab"}
        words = "dropped a request of client 0 that has the id of its live request"
        assert [words in record.getMessage() for record in caplog.records] == [True, True]

    def test_an_id_whose_request_has_ended_is_like_any_other(self, held):
        client, _ = held.clients
        held.rig.executor.during.go_on.set()
        client.until(lambda: client.ends)
        held.rig.executor.during.begun.clear()
        held.rig.executor.during.go_on.clear()
        client.send(ADD, request("b"))
        assert held.rig.executor.during.begun.wait(PATIENCE_S)
        client.send(ADD, request("a", prompt=OUTSIDE))
        client.until(lambda: client.ends["a"] == "error")

    def test_a_check_that_fails_itself_is_a_refusal(self, serve, caplog):
        checks = RequestCheck(100_000)

        def check(sent):
            checks(sent)
            raise {"key": KeyError("no such table"), "memory": MemoryError()}[sent.request_id]

        def only_bad(sent):
            if sent.request_id in ("key", "memory"):
                check(sent)

        (client,) = serve(check=only_bad).clients
        for name in ("key", "memory", "good"):
            client.send(ADD, request(name))
        client.until(lambda: len(client.ends) == 3)
        assert client.ends == {"key": "error", "memory": "error", "good": "length"}
        words = "looking at a message of type ADD failed: KeyError: 'no such table'"
        assert client.errors["key"] == words
        assert client.errors["memory"] == "it does not fit into memory"
        (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert record.exc_info[0] is KeyError


class Spoils:
    """Puts something into the outputs of one request, as a plugin may."""

    def __init__(self, served, name, **fields):
        self._step, self._name, self._fields = served.rig.core.step, name, fields
        served.rig.core.step = self

    def __call__(self, late_aborts):
        outputs, executed = self._step(late_aborts)
        for message in outputs.values():
            for output in message.outputs:
                if output.request_id == self._name:
                    for field, value in self._fields.items():
                        setattr(output, field, value)
        return outputs, executed


class TestOutputs:
    def test_one_that_cannot_be_sent_ends_its_request_alone(self, serve):
        executor = ScriptedExecutor()
        second_step = MidStep(executor, lambda plan: plan.step > 1)
        served = serve(executor)
        (client,) = served.clients
        Spoils(served, "bad", kv_transfer_params={"handle": object()})
        client.send(ADD, request("bad", max_tokens=190))
        client.send(ADD, request("good", max_tokens=190))
        client.until(lambda: client.ends)
        assert client.ends == {"bad": "error"}
        assert client.errors["bad"] == (
            "the output's kv_transfer_params cannot be sent: "
            "dict: a builtins.object cannot travel between processes"
        )
        alone = MidStep(executor, lambda plan: "bad" not in executor.rows)
        second_step.go_on.set()
        assert alone.begun.wait(PATIENCE_S)
        assert "good" not in client.ends
        alone.go_on.set()
        client.until(lambda: "good" in client.ends)
        assert client.tokens["good"] == expected([1, 2, 3], 190)
        assert not client.read(0.1)
        assert client.ends == {"bad": "error", "good": "length"}  # no second end
        assert not client.tokens["bad"]
        client.send(ADD, request("bad again"))
        client.until(lambda: "bad again" in client.ends)
        assert client.ends["bad again"] == "length"

    def test_the_last_one_of_a_request(self, serve):
        served = serve()
        (client,) = served.clients
        Spoils(served, "a", pooling_output={1, "two", threading.Lock()})
        client.send(ADD, request("a", max_tokens=1))
        client.until(lambda: client.ends)
        assert client.ends == {"a": "error"}
        assert client.errors["a"].startswith("the output's pooling_output cannot be sent: ")
        assert "_thread.lock cannot travel" in client.errors["a"]
        assert served.rig.core.num_unfinished_requests() == 0

    def test_behind_its_end_in_one_message_the_id_is_that_of_another_request(self):
        frames = OutputEncoder(lambda _ids, _client: None)
        bad = EngineCoreOutput(request_id="a", new_token_ids=[1], pooling_output=object())
        frames.encode_into(EngineCoreOutputs(outputs=[bad]), bytearray(), 0)
        end = EngineCoreOutput(request_id="a", finish_reason=FinishReason.ABORT)
        again = EngineCoreOutput(request_id="a", new_token_ids=[2])
        sent = frames.encode_into(EngineCoreOutputs(outputs=[end, again]), bytearray(), 0)
        decoded = Decoder(EngineCoreOutputs).decode([bytes(frame) for frame in sent])
        assert [output.new_token_ids for output in decoded.outputs] == [[2]]

    def test_an_id_may_be_used_again_after_it(self, serve):
        served = serve()
        (client,) = served.clients
        spoiled = Spoils(served, "a", pooling_output=object())
        client.send(ADD, request("a", max_tokens=30))
        client.until(lambda: client.ends)
        wait_until(
            lambda: (
                not (served.rig.core.num_unfinished_requests() or served.io._encoder._failed_ids)
            )
        )
        served.rig.core.step = spoiled._step
        client.ends.clear()
        client.send(ADD, request("a"))
        client.until(lambda: client.ends)
        assert client.ends == {"a": "length"}
        assert client.tokens["a"] == expected([1, 2, 3], 4)


class Linked:
    """An engine's threads and a client's sockets."""

    def __init__(self):
        self.sockets = EngineSockets()
        self.rig = LoopRig()
        self.seen = []
        self.io = EngineIO(
            self.sockets.identity,
            self.sockets.addresses,
            self.rig.queues,
            self.seen.append,
        )
        self.outputs: list[EngineCoreOutput] = []
        self.ended = threading.Event()
        self.io.start(READY)
        self.rig._thread.start()
        assert self.sockets.poll_ready(int(PATIENCE_S * 1000)) is not None
        self.sockets.read(self._take, lambda _error: self.ended.set())

    def _take(self, message: EngineCoreOutputs) -> None:
        self.outputs += message.outputs
        if any(output.finished for output in message.outputs):
            self.ended.set()

    def run(self, **fields):
        """Run a request; return it as the engine saw it, and its last output."""
        self.sockets.send(ADD, request("a", max_tokens=1, **fields))
        assert self.ended.wait(PATIENCE_S)
        return self.seen[-1], self.outputs[-1]

    def close(self):
        self.rig.loop.request_shutdown()
        self.rig.loop.request_shutdown()
        self.rig._thread.join(PATIENCE_S)
        self.io.close(failed=False, has_clients=False)
        self.sockets.close()


@pytest.fixture
def link():
    opened = Linked()
    yield opened
    opened.close()


def test_large_tensors_are_frames_of_requests_and_outputs(link):
    sent, answer = torch.randn(1000).to(torch.bfloat16), torch.randn(50, 2)
    link.rig.core.step = _answering(link.rig.core.step, answer)
    seen, output = link.run(kv_transfer_params={"block": sent})
    assert seen.kv_transfer_params["block"].dtype == torch.bfloat16
    assert seen.kv_transfer_params["block"].view(torch.int16).equal(sent.view(torch.int16))
    assert output.kv_transfer_params["block"].equal(answer)


def test_a_large_tensor_in_a_call_is_refused_by_its_type(link):
    answered = link.sockets.call("why_waiting", torch.zeros(1000))
    with pytest.raises(ValueError, match=r"request_ids: .*a torch.Tensor cannot be converted"):
        answered.result(PATIENCE_S)


def _answering(step, tensor):
    def stepped(late_aborts):
        outputs, executed = step(late_aborts)
        for message in outputs.values():
            for output in message.outputs:
                output.kv_transfer_params = {"block": tensor}
        return outputs, executed

    return stepped
