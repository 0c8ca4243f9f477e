"""The hook that may change a request, and what is made sure of afterwards."""

from __future__ import annotations

import copy

import msgspec

from hardpoint.plugins import EngineCoreRequest, PluginFaultError, RequestError
from hardpoint.registry.hooks import HookSet

from .plugin_arguments import PluginArguments
from .validation import ReadyMade

__all__ = ["ReceivedHook"]

_FIXED = ("request_id", "external_req_id", "child_index", "client_index")
"""What the frontend knows a completion by."""


class ReceivedHook:
    """Calls `request_received`, and checks what became of the request as of one from outside."""

    def __init__(self, hooks: HookSet, ready_made: ReadyMade, arguments: PluginArguments) -> None:
        """Prepare; without an implementation of the hook, nothing is done."""
        self._hooks = hooks
        self._check = ready_made.checked
        self._arguments = arguments

    def __call__(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return the request as the hooks would have it.

        Raises:
            RequestError: a hook refuses it, failed, or made of it what no engine can take.
        """
        if not self._hooks.has("request_received"):
            return request
        before = msgspec.structs.replace(request, plugin_args=copy.deepcopy(request.plugin_args))
        try:
            self._hooks.call("request_received", request=request)
        except PluginFaultError as fault:
            cause = fault.__cause__
            message = str(cause) if isinstance(cause, ValueError) else str(fault)
            raise RequestError(message) from fault
        try:
            _refuse_another_identity(request, before)
            checked = self._check(request)
            self._arguments.revise(checked, before)
        except RequestError as error:
            who = self._hooks.authors("request_received")
            raise RequestError(f"{who}: after its hook request_received: {error}") from error
        return checked


def _refuse_another_identity(request: EngineCoreRequest, before: EngineCoreRequest) -> None:
    for field in _FIXED:
        was, now = getattr(before, field), getattr(request, field)
        if now != was:
            raise RequestError(
                f"{field}: expected {was!r}, for the frontend gives it and hooks may not change "
                f"it, got {now!r}"
            )
