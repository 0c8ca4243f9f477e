"""A plugin of each kind that works; `Broken` derives from one of them."""

from __future__ import annotations

import torch

from hardpoint import plugins
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import (
    BatchLogitsProcessor,
    Edits,
    GrammarBackend,
    KVEventPublisher,
    LogitsProcessor,
    OutputParser,
    Phase,
    ReasoningMarkers,
    Sampler,
    SchedulingPolicy,
    SparseLogitsProcessor,
    StatSink,
    TensorSpec,
    hookimpl,
)
from hardpoint.plugins.output_parser import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.testing import HistoryAttention, ScriptedModel
from hardpoint.toolkit.bitmasks import allow_tokens
from support.broken.communicators import Right as ThreadCommunicator
from support.broken.ops import Plain
from support.broken.quantizations import Right as EightBits
from support.broken.tokenizers import Bytes, ByteStream
from support.core.scripted_connector import SchedulerHalf, ScriptedConnector, WorkerHalf
from support.plugins.kv_stores import FolderStore
from support.samples import Sample

NAME = "broken"
USE = f"{__name__}:Broken"
Broken: type
"""The class that the configuration names; each case sets it anew."""
started = False
"""Whether the engine of the case has started."""


class Dense(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def start(self, request):
        return 0

    def advance(self, state, token):
        return state + 1

    def apply(self, logits, rows):
        return logits + rows.tensor("by")


class Observing(Dense):
    contract = 1
    max_state_bytes = 32

    class State(plugins.State):
        count: int

    def start(self, request):
        return self.State(count=0)

    advance = LogitsProcessor.advance

    def observe(self, state, token, logprob):
        return self.State(count=state.count + 1)


class Sparse(SparseLogitsProcessor):
    contract = 1
    phase = Phase.BIAS
    Arguments = Dense.Arguments

    def edits(self, rows):
        return Edits([0], [65], [1.0])


class Whole(BatchLogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        by: float = 1.0

    @classmethod
    def uses(cls, params):
        return False

    def update_state(self, update):
        pass

    def apply(self, logits):
        return logits


class OnDevice(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS
    Arguments = Dense.Arguments

    def device_state(self):
        return {"counts": TensorSpec((self.context.vocab_size,), "int32")}

    def start_row(self, request, tensors):
        pass

    def advance_rows(self, rows, tokens, tensors):
        tensors["counts"][range(len(tokens)), tokens] += 1

    def apply(self, logits, rows):
        return logits - rows.state_tensor("counts")


class Greedy(Sample, Sampler, contract=1):
    class Arguments(plugins.Arguments):
        by: float = 1.0

    def sample(self, logits, rows):
        return logits.argmax(-1)


class Scheduling(DefaultScheduler):
    contract = 1


class Policy(SchedulingPolicy):
    contract = 1
    state_format = "broken-1"

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def key(self, request):
        return request.arrival_time

    def group(self, request):
        return request.request_id

    def group_key(self, group, now):
        return group

    def admit(self, request, load):
        return None

    def victim(self, running, load):
        return running[-1]

    def added(self, request):
        pass

    def scheduled(self, request, tokens):
        pass

    preempted = finished = added

    def export_state(self):
        return {}

    def import_state(self, state):
        pass


class Eviction(LeastRecentlyUsed):
    contract = 1


class Publisher(Sample, KVEventPublisher, contract=1):
    def publish(self, batch):
        pass


class Connector(ScriptedConnector):
    contract = 1
    Scheduler = SchedulerHalf
    Worker = WorkerHalf

    def scheduler_half(self, context):
        return self.Scheduler(self.script, context)

    def worker_half(self, context):
        return self.Worker(self.script, context)


class Store(FolderStore):
    contract = 1


class InProcess(UniprocExecutor):
    contract = 1


class Communicating(ThreadCommunicator):
    contract = 1


class Scripted(ScriptedModel):
    contract = 1


class Loader(DummyLoader):
    contract = 1


class FewBits(EightBits):
    contract = 1


class Attention(HistoryAttention):
    contract = 1


class Operations(Plain):
    contract = 1


class ByteTokens(Bytes):
    contract = 1
    Stream = ByteStream

    def decode_stream(self, prompt_token_ids, *, skip_special_tokens=True):
        return self.Stream(skip_special_tokens)

    def apply_chat_template(self, messages, **kwargs):
        return "".join(message["content"] for message in messages)


class Letters:
    """As many letters a as are left."""

    def __init__(self, left):
        self.left = left

    def fill_bitmask(self, row):
        allow_tokens(row, [64] if self.left[-1] else [])
        return self.left[-1] == 0

    def advance(self, token_id):
        if self.left[-1] and token_id == 64:
            self.left.append(self.left[-1] - 1)
            return True
        return False

    def rollback(self, count):
        del self.left[-count:]

    def fork(self):
        return type(self)(self.left[:])


class Grammar(GrammarBackend):
    """Compiles any regex to `aa`."""

    contract = 1
    formats = ("regex",)
    State = Letters

    def compile(self, structured):
        return self.State([2])


class Words:
    """Every piece is reasoning, or a call."""

    in_reasoning = False

    def __init__(self, roles):
        self.roles = roles

    def feed(self, text):
        if self.roles == ("reasoning",):
            return [ReasoningText(text)]
        return [ContentText(text)]

    def feed_token(self, token_id, text):
        return self.feed(text)

    def finish(self):
        if self.roles == ("reasoning",):
            return []
        return [ToolCallBegin("f"), ToolCallArguments("{}"), ToolCallEnd()]


class Reasoning(OutputParser):
    contract = 1
    roles = ("reasoning",)
    State = Words

    class Arguments(plugins.Arguments):
        by: float = 1.0

    def markers(self):
        return ReasoningMarkers(start=((64,),), end=((65,),))

    @property
    def token_ids(self):
        return frozenset()

    def open(self, request):
        return self.State(self.roles)


class Tools(Reasoning):
    contract = 1
    roles = ("tools",)

    def markers(self):
        return ReasoningMarkers()


class Sink(Sample, StatSink, contract=1):
    def record(self, stats):
        pass

    def report(self):
        pass

    def exposition(self, plugins):
        return ""


class Hooks:
    """Hooks without any effect."""

    contract = 1

    @hookimpl
    def engine_started(self, info):
        pass

    @hookimpl
    def engine_closing(self):
        pass

    @hookimpl
    def step_planned(self, record):
        pass

    @hookimpl
    def request_received(self, request):
        pass

    @hookimpl
    def request_finished(self, output):
        pass


def cut_row(self, logits, *_):
    return logits[:, :-1]


def cut_vocabulary(self, logits, *_):
    return torch.full((len(logits),), 10**6)
