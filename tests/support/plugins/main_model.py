"""Plugins with sequences of the engine's own model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from hardpoint import plugins
from hardpoint.plugins import Speculator, StepPart


class SelfDraft(Speculator):
    """Drafts the likeliest tokens of the engine's own model."""

    contract = 1

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.model = context.open_model(context.MAIN_MODEL, 2048, same_tokens=True)

    def propose(self, requests: Sequence[Any], budget: int) -> list[list[int]]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: Any) -> list[int]:
        name, drafts = request.request_id, []
        new = [*request.prompt_token_ids, *request.output_token_ids]
        self.model.cut(name, 0)
        while len(drafts) < request.limit:
            logits = self.model.extend({name: new})
            new = [int(logits.argmax())]
            drafts += new
        return drafts

    def ended(self, request: Any) -> None:
        self.model.cut(request.request_id, 0)

    def memory(self) -> int:
        return self.model.cache_bytes

    def close(self) -> None:
        self.model.close()


class NoDraft(SelfDraft):
    """Opens a model that does not exist."""

    contract = 1

    def __init__(self, context: Any) -> None:
        Speculator.__init__(self, context)
        self.model = context.open_model("./nowhere", 2048)


class HugeCache(SelfDraft):
    """Wants more memory than there is."""

    contract = 1

    def __init__(self, context: Any) -> None:
        Speculator.__init__(self, context)
        self.model = context.open_model(context.MAIN_MODEL, 10**15)


class Scores(StepPart):
    """Computes logits of texts between steps."""

    contract = 1

    class Options(plugins.Options):
        num_layers: int | None = None

    options: Options

    def engine_half(self, context: Any) -> Any:
        return _Asks(context)

    def worker_half(self, context: Any) -> Any:
        return _Computes(context, self.options.num_layers)


class _Asks:
    def __init__(self, context: Any) -> None:
        self._context = context

    def call(self, method: str, arguments: Any) -> Any:
        if method not in ("rows", "last", "one by one", "continued", "num_layers"):
            raise plugins.RequestError(f"method: expected one of Scores, got {method!r}")
        (answer,) = self._context.call_workers(msgspec.msgpack.encode([method, arguments]))
        return msgspec.msgpack.decode(answer)


class _Computes:
    def __init__(self, context: Any, num_layers: int | None) -> None:
        self._model = context.open_model(context.MAIN_MODEL, 512, num_layers=num_layers)
        self._num_layers = context.num_layers

    def memory(self) -> dict[str, int]:
        return {"scores": self._model.cache_bytes}

    def call(self, message: bytes) -> bytes:
        method, texts = msgspec.msgpack.decode(message)
        if method == "num_layers":
            return msgspec.msgpack.encode(self._num_layers)
        for name in texts:
            if method != "continued":
                self._model.cut(name, 0)
        if method == "rows":
            logits = self._model.extend(texts, all_rows=True)
        elif method == "one by one":
            ((name, tokens),) = texts.items()
            logits = torch.cat([self._model.extend({name: [token]}) for token in tokens])
        else:
            logits = self._model.extend(texts)
        return msgspec.msgpack.encode(logits.tolist())
