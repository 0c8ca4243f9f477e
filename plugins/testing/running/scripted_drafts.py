"""A speculator and a step part with scripted drafts, for tests of speculative decoding."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from hardpoint import plugins
from hardpoint.plugins import (
    AdmissionGate,
    DraftRequest,
    DraftTokens,
    Meta,
    ModelRunnerOutput,
    PlanData,
    Request,
    RequestFault,
    RequestLifecycle,
    SchedulerOutput,
    Speculator,
    StepObserver,
    StepPart,
    WorkerStep,
)
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext


class _Replies(plugins.Options):
    """Options of both.

    Attributes:
        right: share of the tokens of replies that are drafted as they are.
        replies: token ids of prompts, and of the output that follows each; several may follow one
            prompt.
        seed: chooses which drafts are wrong.
    """

    right: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    replies: list[tuple[list[int], list[int]]] = []
    seed: int = 0


class ScriptedSpeculator(Speculator):
    """Drafts the continuation of scripted replies with some errors, else a wrong token.

    The drafts of a request depend on its prompt, its output and the options alone.
    """

    contract = 1

    class Options(_Replies):
        """Options, see `_Replies`."""

    options: Options

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:  # noqa: ARG002
        """Return the drafts after the output of each request."""
        script = _Script(self.options, self.context.vocab_size)
        return [
            script.after(request.prompt_token_ids, request.output_token_ids, request.limit)
            for request in requests
        ]


class ScriptedDrafts(StepPart):
    """Drafts as `ScriptedSpeculator` does, in the engine or in a worker."""

    contract = 1

    class Options(_Replies):
        """Options, including the options of `_Replies`.

        Attributes:
            count: drafts of a request and a step.
            made_in: the half that makes the drafts. Drafts of the worker are in its reports.
        """

        count: Annotated[int, Meta(ge=1)] = 3
        made_in: Literal["engine", "worker"] = "engine"

    options: Options

    def engine_half(self, context: EngineHalfContext) -> _ReportedDrafts | _EngineDrafts:
        """Return the half that drafts, or that returns the drafts of the workers."""
        if self.options.made_in == "worker":
            return _ReportedDrafts(self.name, self.options)
        return _EngineDrafts(_Script(self.options, context.vocab_size), self.options.count)

    def worker_half(self, context: WorkerHalfContext) -> _WorkerDrafts | None:
        """Return the half that drafts, if it is the worker's."""
        if self.options.made_in == "engine":
            return None
        return _WorkerDrafts(_Script(self.options, context.vocab_size), self.options.count)


class _Script:
    """The drafts that follow an output."""

    def __init__(self, options: _Replies, vocab_size: int) -> None:
        self._right, self._seed, self._vocab_size = options.right, options.seed, vocab_size
        self._replies: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for prompt, reply in options.replies:
            self._replies[tuple(prompt)].append(reply)

    def after(self, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        done, known = list(output), list[int]()
        for reply in self._replies.get(tuple(prompt), ()):
            if reply[: len(done)] == done:
                known = reply
                break
        return [
            self._draft(known, place, f"{self._seed} {len(prompt)} {prompt[-1]} {place}")
            for place in range(len(done), len(done) + count)
        ]

    def _draft(self, known: Sequence[int], place: int, seed: str) -> int:
        drawn = random.Random(seed)
        if place >= len(known):
            return drawn.randrange(self._vocab_size)
        token = known[place]
        return token if drawn.random() < self._right else (token + 1) % self._vocab_size


class _EngineDrafts(AdmissionGate, DraftTokens, RequestLifecycle):
    """Drafts in the engine's process."""

    def __init__(self, script: _Script, count: int) -> None:
        self.num_draft_tokens = count
        self._script = script
        self._requests: dict[str, Request] = {}

    def gate(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def drafts(self) -> Mapping[str, Sequence[int]]:
        return {
            name: self._script.after(
                request.source.prompt_token_ids, request.output_token_ids, self.num_draft_tokens
            )
            for name, request in self._requests.items()
        }

    def ended(self, request_id: str) -> None:
        self._requests.pop(request_id, None)


class _ReportedDrafts(AdmissionGate, PlanData, StepObserver, DraftTokens, RequestLifecycle):
    """Hands on the drafts in the reports of the worker half."""

    def __init__(self, name: str, options: ScriptedDrafts.Options) -> None:
        self.num_draft_tokens = options.count
        self._name = name
        self._live: set[str] = set()
        self._reported: dict[str, list[int]] = {}

    def gate(self, request: Request) -> None:
        self._live.add(request.request_id)

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return which requests are live, so that workers forget the others."""
        planned = self._live & plan.num_scheduled_tokens.keys()
        return msgspec.msgpack.encode(sorted(self._live)) if planned else None

    def result(
        self,
        plan: SchedulerOutput,  # noqa: ARG002
        result: ModelRunnerOutput,
    ) -> Mapping[str, RequestFault]:
        for report in result.part_reports.get(self._name, {}).values():  # of the rank that samples
            self._reported = msgspec.msgpack.decode(report, type=dict[str, list[int]])
        return {}

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Return the reported drafts once, of requests that have not ended since."""
        reported, self._reported = self._reported, {}
        return {name: tokens for name, tokens in reported.items() if name in self._live}

    def ended(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._reported.pop(request_id, None)


class _WorkerDrafts(WorkerStep):
    """Drafts in the worker, from the plans and the sampled tokens."""

    def __init__(self, script: _Script, count: int) -> None:
        self._script, self._count = script, count
        self._known: dict[str, tuple[Sequence[int], list[int]]] = {}  # prompt and output
        self._drafts: dict[str, list[int]] = {}

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        live = set(msgspec.msgpack.decode(data, type=list[str]))
        self._known = {name: known for name, known in self._known.items() if name in live}
        for new in plan.new_requests:
            if (name := new.source.request_id) in live:
                self._known[name] = new.source.prompt_token_ids, list(new.output_token_ids)

    def sampled(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._drafts = {}
        for name, tokens in token_ids.items():
            prompt, output = self._known[name]
            output += tokens
            self._drafts[name] = self._script.after(prompt, output, self._count)

    def report(self) -> bytes:
        drafts, self._drafts = self._drafts, {}
        return msgspec.msgpack.encode(drafts)
