"""An attention backend whose requests may limit how many tokens each token sees."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import RequestError
from hardpoint.testing.scripted import HistoryAttention, history_hash


class Windowed(HistoryAttention):
    contract = 1

    class Arguments(plugins.Arguments):
        window: Annotated[int, Meta(ge=1)] | None = None

    def attend(self, spec, cache, plan, q, k, v):
        result = super().attend(spec, cache, plan, q, k, v)
        for index, arguments in enumerate(plan.arguments):
            if arguments.window is not None:
                self._limit(result, cache, plan, index, arguments.window)
        return result

    def _limit(self, result, cache, plan, index, window):
        start, end = plan.query_starts[index : index + 2].tolist()
        length = int(plan.seq_lens[index])
        blocks = plan.block_table[index, : -(-length // plan.block_size)]
        tokens = cache[blocks].view(-1)[:length].tolist()
        for row in range(start, end):
            last = length - (end - row) + 1
            value = history_hash(tokens[max(last - window, 0) : last])
            result[row, 0, 0], result[row, 0, 1] = value >> 16, value & 0xFFFF


class Prepared(Windowed):
    """The window of a request that gives none is half of its prompt."""

    contract = 1

    @classmethod
    def prepare(cls, arguments, context):
        if arguments.window == 13:
            raise RequestError("window: 13 brings no luck")
        return cls.Arguments(window=arguments.window or len(context.prompt_token_ids) // 2 + 1)


class Needs(Windowed):
    contract = 1

    class Arguments(plugins.Arguments):
        window: int
