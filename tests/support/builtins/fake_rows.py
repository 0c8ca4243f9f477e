"""Rows, contexts and a naive way to apply edits, for tests of logits processors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from hardpoint.plugins import (
    Edits,
    LogitsContext,
    LogitsRequest,
    Op,
    Ops,
    PrepareContext,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.testing import load_ops
from hardpoint.typed import prepared_type

_versions = itertools.count(1)


class FakeRows:
    """Rows of one processor, as the contract describes them; each object is a new version."""

    def __init__(self, processor: LogitsPlugin, requests: Sequence[LogitsRequest]) -> None:
        self.requests = list(requests)
        self.version = next(_versions)
        self._name = processor.name

    def __len__(self) -> int:
        return len(self.requests)

    def arguments(self) -> list[Any]:
        return [request.arguments[self._name] for request in self.requests]

    def states(self) -> list[Any]:
        return [request.state[self._name] for request in self.requests]

    def tensor(self, name: str) -> torch.Tensor:
        values = [getattr(arguments, name) for arguments in self.arguments()]
        whole = all(isinstance(value, int) for value in values)
        dtype = torch.int64 if whole else torch.float32
        return torch.tensor(values, dtype=dtype).unsqueeze(1)


def build(cls: type[LogitsPlugin], name: str, vocab_size: int = 10, ops: Ops | None = None) -> Any:
    """Return a processor for a vocabulary of that size, on the CPU."""
    return cls(
        LogitsContext(
            name=name,
            options=cls.Options(),
            device=torch.device("cpu"),
            vocab_size=vocab_size,
            max_num_seqs=64,
            ops=ops or _torch_ops(),
        )
    )


@cache
def _torch_ops() -> Ops:
    return load_ops(torch.float32)


def rows_of(processor: LogitsPlugin, *requests: LogitsRequest) -> FakeRows:
    """Return the rows of some requests, their states started."""
    for request in requests:
        request.state[processor.name] = processor.start(request)
    return FakeRows(processor, requests)


def request_of(
    processor: LogitsPlugin,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop: Sequence[int] = (),
    **arguments: Any,
) -> LogitsRequest:
    """Return a request that uses a processor with these arguments."""
    return LogitsRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        params=SamplingParams(),
        stop_token_ids=list(stop),
        arguments={processor.name: prepared_type(type(processor))(**arguments)},
    )


def prepared(
    cls: type[LogitsPlugin],
    *,
    params: SamplingParams | None = None,
    vocab_size: int = 10,
    stop: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    **arguments: Any,
) -> Any:
    """Return the result of a processor's `prepare` for these arguments."""
    context = PrepareContext(
        options=cls.Options(),
        params=params or SamplingParams(),
        prompt_token_ids=[1],
        stop_token_ids=stop,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
    )
    return cls.prepare(cls.Arguments(**arguments), context)


def applied(edits: Edits | None, logits: torch.Tensor) -> torch.Tensor:
    """Return logits after edits, applied one by one."""
    result = logits.clone()
    if edits is None:
        return result
    if edits.op is Op.KEEP_ONLY:
        for row in set(edits.row):
            result[row] = -torch.inf
    for index, (row, token) in enumerate(zip(edits.row, edits.token, strict=True)):
        if edits.op is Op.KEEP_ONLY:
            result[row, token] = logits[row, token]
        elif edits.op is Op.SET:
            result[row, token] = edits.value[index]
        else:
            result[row, token] += edits.value[index]
    return result


def survivors(logits: torch.Tensor) -> list[list[int]]:
    """Return each row's tokens that are not at -inf."""
    return [(row > -torch.inf).nonzero().flatten().tolist() for row in logits]
