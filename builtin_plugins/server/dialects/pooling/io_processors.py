"""`/pooling`: inputs of IO processors, and pooled texts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.builtin_plugins.server.routes.answers import answer_ids
from hardpoint.builtin_plugins.server.service import Service
from hardpoint.plugins import RequestError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.server import Call, Route

from .request import PooledFields, PooledUsage, Texts
from .texts import TextPooler, encoded, usage_of

_OF_INPUT = (
    "dimensions",
    "encoding_format",
    "normalize",
    "plugin_args",
    "pooler",
    "use_activation",
)
"""Fields that an IO processor would not see."""

_PATH = "/pooling"


class PoolingRequest(PooledFields, kw_only=True):
    """An input for an IO processor, or texts to pool.

    Attributes:
        data: the input of an IO processor.
        io_processor: its name; not needed if one alone is enabled.
        input: a text, token ids, or a list of these.
        task: "plugin" with `data`; with `input`, the kind of result, by default "embed".
        encoding_format: "base64" gives float32 numbers, little-endian; of "token_embed", one row
            after the other.
        dimensions: size of the vectors, of a model that was trained for vectors that are cut.
        normalize: whether vectors are scaled to length 1; by default as the model has it.
        use_activation: whether logits of classes become probabilities, which is the default.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "messages": "send the text of the conversation as input",
        "prompt": "send it as input",
    }

    data: Annotated[
        Any, Meta(extra_json_schema={"$ref": "#/components/schemas/IOProcessorData"})
    ] = UNSET
    io_processor: Annotated[str, Meta(min_length=1)] | None = None
    input: Texts = UNSET
    task: Literal["plugin", "embed", "token_embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class PooledText(msgspec.Struct):
    """The result of a text: numbers, lists of numbers for "token_embed", or base64."""

    object: Literal["pooling"]
    index: int
    data: Any


class PooledResult(msgspec.Struct, omit_defaults=True):
    """The answer of an IO processor, or the results of texts.

    Attributes:
        data: the answer of the processor, of any form; or the result of each text.
        request_id: the same as `id`, of the answer of a processor.
        created_at: the same as `created`.
        io_processor: name of the processor.
        usage: tokens of the texts.
    """

    id: str
    object: Literal["list", "processed"]
    created: int
    model: str
    data: list[PooledText] | msgspec.Raw
    request_id: str | None = None
    created_at: int | None = None
    io_processor: str | None = None
    usage: PooledUsage | None = None


class PoolingRoute:
    """The route."""

    def __init__(self, service: Service) -> None:
        self._service, self._pooler = service, TextPooler(service)

    def routes(self) -> list[Route]:
        """Return the route."""
        return [
            Route(
                path=_PATH,
                endpoint=self.pool,
                methods=("POST",),
                summary="Give an input to an IO processor, or pool texts.",
                request_type=PoolingRequest,
                response_type=PooledResult,
            )
        ]

    async def pool(self, request: Request) -> Response:
        """Return the answer of an IO processor, or the results of texts."""
        call, body = await self._service.requests.read(request, PoolingRequest)
        model = self._service.base_model(body.model)
        _check(body)

        async def work() -> PooledResult:
            made = answer_ids("pool-", call, body.request_id)[0], int(time.time())
            if body.data is UNSET:
                return await self._texts(call, body, model, *made)
            return await self._processed(call, body, model, *made)

        return await self._service.answer(request, call, work)

    async def _processed(
        self, call: Call, body: PoolingRequest, model: str, request_id: str, now: int
    ) -> PooledResult:
        plugins = self._service.engine.plugins
        extras = self._service.extras(call, body)
        answer = await plugins.process(body.data, body.io_processor, as_json=True, **extras)
        name = body.io_processor or next(iter(plugins.io_processor_schemas()))
        return PooledResult(
            request_id, "processed", now, model, msgspec.Raw(answer), request_id, now, name
        )

    async def _texts(
        self, call: Call, body: PoolingRequest, model: str, request_id: str, now: int
    ) -> PooledResult:
        task: Any = body.task or "embed"
        params = PoolingParams(
            task=task,
            pooler=body.pooler,
            plugin_args=body.plugin_args,
            dimensions=body.dimensions,
            normalize=body.normalize,
            use_activation=body.use_activation,
        )
        outputs = await self._pooler.results(call, body, body.input, params)
        data = [
            PooledText("pooling", index, result)
            for index, result in enumerate(encoded(outputs, body.encoding_format))
        ]
        usage = usage_of(outputs)
        return PooledResult(request_id, "list", now, model, data, usage=usage)


def _check(body: PoolingRequest) -> None:
    """Check that a request has either data or input, and the fields of that alone."""
    if (body.data is UNSET) == (body.input is UNSET):
        fields = "neither" if body.data is UNSET else "both"
        raise RequestError(
            f"data: expected either data, for an IO processor, or input, got {fields}"
        )
    if body.input is not UNSET:
        if body.io_processor is not None:
            raise RequestError("io_processor: expected none with input, as it takes data")
        if body.task == "plugin":
            raise RequestError('task: expected data with "plugin", got input')
        return
    if body.task not in (None, "plugin"):
        raise RequestError(f'task: expected "plugin" with data, got "{body.task}"')
    defaults = PoolingRequest()
    for name in _OF_INPUT:
        if getattr(body, name) != getattr(defaults, name):
            raise RequestError(f"{name}: expected none with data, which an IO processor reads")
