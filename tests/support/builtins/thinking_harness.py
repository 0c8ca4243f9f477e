"""A request with a thinking budget that is driven by hand."""

from __future__ import annotations

from hardpoint.builtin_plugins.logits.thinking_budget import ThinkingBudget
from hardpoint.plugins import ReasoningMarkers
from support.builtins.fake_rows import FakeRows, build, request_of, rows_of

START, END = [1], [2]
LONG_START, LONG_END = [1, 3], [2, 4, 2, 5]


def markers(start=START, end=END):
    return ReasoningMarkers(
        start=(tuple(start),) if start else (), end=(tuple(end),) if end else ()
    )


def processor():
    return build(ThinkingBudget, "thinking_budget")


class Request:
    """A request that is driven by hand."""

    def __init__(self, prompt=(), output=(), budget=3, start=START, end=END):
        self.processor = processor()
        self.request = request_of(
            self.processor,
            prompt,
            output,
            thinking_token_budget=budget,
            markers=markers(start, end),
        )
        rows_of(self.processor, self.request)

    @property
    def state(self):
        return self.request.state["thinking_budget"]

    def accept(self, *tokens):
        for token in tokens:
            self.request.output_token_ids.append(token)
            self.request.state["thinking_budget"] = self.processor.advance(self.state, token)
        return self

    @property
    def forced(self):
        return forced(self.processor, self.state)

    def drafted(self, *drafts):
        """Return the forced tokens before each draft and after the last; keeps nothing."""
        state = self.processor.fork(self.state)
        result = [forced(self.processor, state)]
        for draft in drafts:
            state = self.processor.advance(state, draft)
            result.append(forced(self.processor, state))
        return result

    def run(self, *wanted):
        """Sample the wanted tokens, except where one is forced; return the output."""
        out = []
        for token in wanted:
            out.append(token if self.forced is None else self.forced)
            self.accept(out[-1])
        return out


def forced(processor, state):
    request = request_of(processor)
    request.state["thinking_budget"] = state
    edits = processor.edits(FakeRows(processor, [request]))
    return None if edits is None else edits.token[0]
