"""Requests that move to another engine: the actions of a client after the loss of its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from hardpoint import RequestOutput
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, RequestExtras
from hardpoint.host.system.encoding import Decoder, Encoder
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from hardpoint.plugins.requests import ResumedOutputs
from support.driving import Job
from support.internals import use_client


def over_the_wire(message):
    """The message as another process gets it."""
    frames = [bytes(frame) for frame in Encoder().encode(message)]
    return Decoder(type(message)).decode(frames)


@dataclass
class Sent:
    """A request with its results: all data that another engine needs.

    Attributes:
        request: as it was sent.
        outputs: how many came.
        moves: after how many outputs it moves; those that are done are taken out.
        place: index of the engine that has it.
    """

    request: EngineCoreRequest
    moves: list[int]
    outputs: int = 0
    place: int = 0
    tokens: list[int] = field(default_factory=list)
    observed: list[float] | None = None
    num_prompt_logprobs: int = 0
    num_routed: int = 0
    part_figures: dict | None = None
    weight_runs: list | None = None

    def take(self, output: EngineCoreOutput) -> None:
        self.outputs += 1
        self.tokens += output.new_token_ids
        if output.observed_logprobs is not None:
            self.observed = (self.observed or []) + output.observed_logprobs
        self.num_prompt_logprobs += len(output.prompt_logprobs or ())
        if output.routed_experts is not None:
            self.num_routed += len(output.routed_experts)
        self.part_figures = output.part_figures or self.part_figures
        self.weight_runs = output.weight_runs or self.weight_runs

    def resumed(self) -> EngineCoreRequest:
        before = self.request.resumed
        resumed = ResumedOutputs(
            self.tokens,
            self.observed,
            self.num_prompt_logprobs,
            self.num_routed,
            1 if before is None else before.num_resumes + 1,
            self.part_figures,
            self.weight_runs,
        )
        self.request = msgspec.structs.replace(self.request, resumed=resumed)
        return over_the_wire(self.request)


class MovingClient:
    """The client of several engines; a request moves on to the next one after some outputs.

    Attributes:
        sent: requests by internal id.
        num_moves: how many there were.
        num_preemptions: sum over all engines, once they have ended.
        outputs: all outputs of the engines, by the user's id.
    """

    in_process = True

    def __init__(self, engines: Sequence[LLMEngine], moves: Callable[[str], Iterable[int]]):
        """Moves of a request by the user's id: after how many outputs of it."""
        self._clients = [engine.parts.client for engine in engines]
        self.activity = self._clients[0].activity
        self._moves = moves
        self.sent: dict[str, Sent] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.num_moves = self.num_preemptions = 0

    def add_request(self, request):
        moves = sorted(self._moves(request.external_req_id))
        self.sent[request.request_id] = Sent(over_the_wire(request), moves)
        self._clients[0].add_request(request)

    def add_requests(self, requests):
        for request in requests:
            self.add_request(request)

    def abort_requests(self, request_ids):
        for name in request_ids:
            self._clients[self.sent.pop(name).place].abort_requests([name])

    def get_output(self, *, wait, timeout=None):
        self._move()
        taken = []
        for place, client in enumerate(self._clients):
            for output in client.get_output(wait=False).outputs:
                sent = self.sent.get(output.request_id)
                if sent is None or sent.place != place:  # it is lost with its engine
                    continue
                output = over_the_wire(output)
                sent.take(output)
                name = sent.request.external_req_id
                self.outputs.setdefault(name, []).append(output)
                taken.append(output)
                if output.finished:
                    del self.sent[output.request_id]
        return EngineCoreOutputs(outputs=taken)

    def _move(self):
        for name, sent in self.sent.items():
            if sent.moves and sent.moves[0] <= sent.outputs:
                del sent.moves[0]
                self._clients[sent.place].abort_requests([name])
                sent.place = (sent.place + 1) % len(self._clients)
                self.num_moves += 1
                self._clients[sent.place].add_request(sent.resumed())

    def call_utility(self, method, *args, timeout=None):
        return self._clients[0].call_utility(method, *args, timeout=timeout)

    def end_waiting(self):
        pass

    def close(self):
        for client in self._clients:
            client.close()


def run_moving(
    engines: Sequence[LLMEngine],
    jobs: Sequence[Job],
    moves: Callable[[str], Iterable[int]],
    extras: RequestExtras = NO_EXTRAS,
) -> tuple[dict[str, RequestOutput], MovingClient]:
    """Run jobs on the first engine, moving on to the others; return their last outputs."""
    client = MovingClient(engines, moves)
    engine, results = engines[0], {}
    with use_client(engine, client):
        for job in jobs:
            engine.add_request(*job, extras)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    results[output.request_id] = output
    return results, client


def at_every_output(job: Job, count: int) -> list[Job]:
    """The job once for each number of outputs, after which it moves; see `place_of`."""
    request_id, prompt, params = job
    return [(f"{request_id}@{place}", prompt, params) for place in range(count)]


def place_of(request_id: str) -> list[int]:
    return [int(request_id.rpartition("@")[2])]
