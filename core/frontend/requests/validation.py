"""Validation of prebuilt requests and of requests that a hook may have changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.errors import PluginFaultError, shown
from hardpoint.host.boundary.parts.output_formats import OutputFormats
from hardpoint.host.registry.blame import text_of
from hardpoint.host.registry.hooks import HookSet
from hardpoint.host.system.encoding import Buffer, Decoder, Encoder, WireError
from hardpoint.plugins import EngineCoreRequest, RequestError, SamplingParams
from hardpoint.plugins.sampling import RequestStates
from hardpoint.typed import check_text

from .input_processor import NO_EXTRAS, InputProcessor, Params, RequestExtras
from .plugin_arguments import PluginArguments

_CLIENT = 0

ParsedRequest = tuple[EngineCoreRequest, OutputFormats | None]
"""A request, and the formats of its outputs; None without any."""


class PrebuiltRequestValidator:
    """Checks requests as an engine process does, so that the engine's place makes no difference.

    Attributes:
        check_resumed: as of `RequestCheck`.
    """

    def __init__(
        self,
        processor: InputProcessor,
        vocab_size: int,
        used: Collection[str] = (),
        processors: Mapping[str, type[RequestStates]] = MappingProxyType({}),
    ) -> None:
        self._processor = processor
        self._check = RequestCheck(vocab_size, used=used, processors=processors)
        self.check_resumed = self._check.check_resumed
        self._decoder: Decoder[EngineCoreRequest] = Decoder(EngineCoreRequest)

    def use(self, processors: Mapping[str, type[RequestStates]]) -> None:
        """Check requests for the logits processors of another generation of the plugins."""
        self._check.processors = processors

    def validate(
        self, request: EngineCoreRequest, params: Params | None, extras: RequestExtras
    ) -> EngineCoreRequest:
        """Return a checked copy of a request that shares nothing with the caller's object.

        Args:
            params: given in addition to the request; must be None.
            extras: given in addition; must be the defaults, but for `prompt_text` and the tools.

        Raises:
            RequestError: a field is wrong or given twice.
        """
        others = msgspec.structs.replace(extras, prompt_text=None, tools=None, calls=None)
        if params is not None or others != NO_EXTRAS:
            raise RequestError("sampling_params: a ready-made EngineCoreRequest brings its own")
        _refuse_frontend_fields(request)
        return self.checked(request)

    def checked(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return a copy with every field checked; it has a seed.

        Raises:
            RequestError: naming the field.
        """
        params = self._processor.checked(request.params)
        copy = self._copy(request, msgspec.structs.replace(params, logits_processors=[]))
        copy.params = self._processor.seeded(params)  # callables are no data, so not the copy's
        self._check(copy)
        return copy

    def _copy(self, request: EngineCoreRequest, params: SamplingParams) -> EngineCoreRequest:
        plain = msgspec.structs.replace(request, params=params)
        try:
            return self._decoder.decode(self._encoded(plain))
        except WireError as error:
            raise RequestError(str(error)) from None

    def _encoded(self, request: EngineCoreRequest) -> Sequence[Buffer]:
        encoder = Encoder()
        try:
            return encoder.encode(request)
        except WireError:
            for field in request.__struct_fields__:  # the error does not name the field
                try:
                    encoder.encode(getattr(request, field))
                except WireError as error:
                    with contextlib.suppress(RecursionError):  # of a value that contains itself
                        check_text(getattr(request, field), field, RequestError)
                    raise RequestError(f"{field}: {error}") from None
            raise


def _refuse_frontend_fields(request: EngineCoreRequest) -> None:
    if request.external_req_id is not None:
        raise RequestError(
            f"external_req_id: expected None, for the frontend gives it, "
            f"got {shown(request.external_req_id)}"
        )
    if request.reasoning_markers is not None:
        raise RequestError(
            "reasoning_markers: expected None, for the frontend gives them, "
            f"got {shown(request.reasoning_markers)}"
        )
    if type(request.client_index) is not int or request.client_index != _CLIENT:
        raise RequestError(
            f"client_index: expected {_CLIENT}, the client that sends it, "
            f"got {shown(request.client_index)}"
        )
    if request.resumed is not None and request.params.n != 1:
        raise RequestError(
            f"resumed: expected none with n {request.params.n}, for each completion has its own"
        )


_FIXED = ("request_id", "external_req_id", "child_index", "client_index")
"""Fields that identify a completion in the frontend."""


class RequestReceivedHook:
    """Calls the hook `request_received`, and validates the request after it."""

    def __init__(
        self, hooks: HookSet, prebuilt: PrebuiltRequestValidator, arguments: PluginArguments
    ) -> None:
        self._hooks = hooks
        self._check = prebuilt.checked
        self._arguments = arguments

    def __call__(self, parsed: ParsedRequest, held: list[OutputFormats | None]) -> ParsedRequest:
        """Return the request as the hooks changed it, with its formats, which it adds to `held`.

        Raises:
            RequestError: a hook refused it, failed, or made it invalid.
        """
        request, formats = parsed
        before = msgspec.structs.replace(request, plugin_args=copy.deepcopy(request.plugin_args))
        try:
            self._hooks.call("request_received", request=request)
        except PluginFaultError as fault:
            cause = fault.__cause__
            message = text_of(cause) if isinstance(cause, ValueError) else str(fault)
            raise RequestError(message) from fault
        try:
            _refuse_changed_identity(request, before)
            checked = self._check(request)
            formats = self._arguments.revise(checked, before, formats)
        except RequestError as error:
            plugins = self._hooks.implementers("request_received")
            raise RequestError(f"{plugins}: after its hook request_received: {error}") from error
        held.append(formats)
        return checked, formats


def _refuse_changed_identity(request: EngineCoreRequest, before: EngineCoreRequest) -> None:
    for field in _FIXED:
        was, now = getattr(before, field), getattr(request, field)
        if now != was:
            raise RequestError(
                f"{field}: expected {was!r}, for the frontend gives it and hooks may not change "
                f"it, got {now!r}"
            )
