"""An output processor with requests of a test's making, and scripted outputs for them."""

from __future__ import annotations

import msgspec

from hardpoint import RequestOutputKind, SamplingParams
from hardpoint.core.frontend.outputs.output_processor import OutputProcessor
from hardpoint.core.frontend.outputs.request_state import ParentRequest
from hardpoint.plugins import EngineCoreOutput, EngineCoreRequest, FinishReason
from hardpoint.plugins.requests import TokenLogprobs
from support.internals import keeps_nothing

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
STOP, LENGTH, ABORT, ERROR, TIMEOUT = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
    FinishReason.TIMEOUT,
)


class Desk:
    """Registers requests, and feeds them outputs as of an engine."""

    def __init__(self, tokenizer, stream_interval=1, formats=None):
        self.tokenizer, self.formats = tokenizer, formats
        self.processor = OutputProcessor(tokenizer, stream_interval)

    def add(self, name="r", prompt="p", *, n=1, fields=None, **params):
        """Register a request; return the internal ids of its completions."""
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=self.tokenizer.encode(prompt),
            params=SamplingParams(n=n, **params),
            **fields or {},
        )
        parent = ParentRequest(f"user's {name}", name, n)
        children = parent.children(request)
        for child in children:
            self.processor.add_request(child, prompt, parent, formats=self.formats)
        return [child.request_id for child in children]

    def output(self, text="", finish=None, name="r", ids=None, **fields):
        """An output of the engine: a text's tokens, or tokens by their ids."""
        return EngineCoreOutput(
            request_id=name,
            new_token_ids=ids or self.tokenizer.encode(text),
            finish_reason=finish,
            **fields,
        )

    def take(self, *outputs):
        """Process a batch; return copies of the users' outputs, and the requests to abort."""
        processed = self.processor.process(outputs)
        return [msgspec.structs.replace(o) for _, o in processed.request_outputs], processed.aborts

    def process(self, *args, **fields):
        """Process one output; return the user's output."""
        outputs, _ = self.take(self.output(*args, **fields))
        return outputs[0] if outputs else None

    def logprobs(self, text):
        """One entry per token of a text: the likeliest, at -1."""
        return [TokenLogprobs([token], [-1.0], 1) for token in self.tokenizer.encode(text)]

    @property
    def is_empty(self):
        processor = self.processor
        return keeps_nothing(processor)


def completion(output):
    (only,) = output.outputs
    return only
