"""Fields of other servers (llama.cpp, SGLang, TGI) that have a counterpart here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta

from hardpoint.plugins import RequestError
from hardpoint.typed import Strict, join_path

__all__ = [
    "CompatibilityFields",
    "ThinkingMode",
    "check_truncation_side",
    "drop_thinking",
    "thinking_variables",
]

T = TypeVar("T", bound=msgspec.Struct)

_TRUNCATION = ("truncation_side", "truncate_prompt_tokens")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_STRUCTURED = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
"""Fields of `StructuredOutputs` by the names of other servers."""

_THINKING = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    # Templates also have the word in texts, and as a field of messages.
    "thinking": re.compile(r"\b(?:if|elif|not|and|or)\s+thinking\b|\bthinking\s+is\b"),
}
"""Names of a template's variable for thinking, and its uses in the template."""


class CompatibilityFields(Strict):
    """Names that other servers have for fields and plugins.

    Attributes:
        repeat_penalty: `repetition_penalty` (llama.cpp, Ollama).
        n_predict: maximum length of the answer (llama.cpp); -1 is the rest of the context.
        best_of: must be `n`: all completions are returned.
        regex, ebnf, json_schema: parts of `structured_outputs` (SGLang); `ebnf` is `grammar` there.
        grammar: a grammar in GBNF (llama.cpp).
        typical_p: the argument `p` of an enabled plugin `typical_p`; 1 turns it off.
        mirostat, mirostat_tau, mirostat_eta: 2 uses an enabled plugin `mirostat` with the
            arguments `tau` and `eta`; 0 turns it off.
        enable_thinking: whether the model thinks, for chat templates with such a variable.
    """

    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    n_predict: Annotated[int, Meta(ge=-1)] | None = None
    best_of: int | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    grammar: str | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    enable_thinking: bool | None = None

    def resolved(self) -> Self:
        """Return the request with the counterparts of these fields.

        Raises:
            RequestError: the request has a field and its counterpart, or there is no counterpart.
        """
        changes: dict[str, Any] = {}
        if self.repeat_penalty is not None:
            self._check_alone("repeat_penalty", "repetition_penalty")
            changes["repetition_penalty"] = self.repeat_penalty
        if self.n_predict is not None:
            changes |= self._length(self.n_predict)
        if self.mirostat == 1:
            raise RequestError("mirostat: expected 0 or 2, the second version, got 1")
        n = getattr(self, "n", UNSET)
        if self.best_of not in (None, 1 if n is UNSET else n):
            raise RequestError(
                "best_of: expected the value of n, because all completions are returned"
            )
        side, limit = (getattr(self, name, None) for name in _TRUNCATION)
        check_truncation_side(side, limit, of_pairs=False)
        return msgspec.structs.replace(self, **changes) if changes else self

    def without_thinking(self, template: Callable[[], str | None]) -> tuple[Self, Sequence[str]]:
        """Return the request without fields that the template ignores; see `drop_thinking`."""
        return drop_thinking(self, template)

    def compatibility_forms(self) -> dict[str, dict[str, Any]]:
        """Return the fields for the form of the answer, as fields of `StructuredOutputs`."""
        forms: dict[str, dict[str, Any]] = {}
        for name, part in _STRUCTURED.items():
            value = getattr(self, name)
            if value not in (None, ""):
                forms[name] = {part: value}
        return forms

    def compatibility_arguments(self) -> dict[str, Any]:
        """Return the arguments of plugins, by plugin."""
        arguments: dict[str, Any] = {}
        if self.typical_p is not None and self.typical_p < 1:
            arguments["typical_p"] = {"p": self.typical_p}
        if self.mirostat:
            figures = {"tau": self.mirostat_tau, "eta": self.mirostat_eta}
            arguments["mirostat"] = {k: value for k, value in figures.items() if value is not None}
        return arguments

    def with_compatibility_names(self, message: str) -> str:
        """Return an error of the engine with the names of these fields if the request has them."""
        if self.repeat_penalty is not None:
            message = re.sub(r"^repetition_penalty\b", "repeat_penalty", message)
        for name in self.compatibility_arguments():
            message = message.removeprefix("plugin_args.") if _is_of(message, name) else message
        for name in ("tau", "eta"):
            message = re.sub(rf"^mirostat\.{name}\b", f"mirostat_{name}", message)
        return re.sub(r"^typical_p\.p\b", "typical_p", message)

    def _length(self, length: int) -> dict[str, Any]:
        names = [name for name in _LENGTHS if name in self.__struct_fields__]
        for name in names:
            self._check_alone("n_predict", name)
        if length < 0:
            return {}
        return {"max_output_tokens" if "max_output_tokens" in names else "max_tokens": length}

    def _check_alone(self, name: str, counterpart: str) -> None:
        if getattr(self, counterpart) not in (None, UNSET):
            raise RequestError(f"{name} and {counterpart}: expected one of them, got both")


class ThinkingMode(Strict):
    """Whether the model thinks, as DeepSeek and GLM have it.

    Attributes:
        type: "auto" leaves it to the chat template.
        budget_tokens: `thinking_token_budget`.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


def thinking_variables(
    template: str | None,
    variables: Mapping[str, Any] | None,
    *,
    enable_thinking: bool | None = None,
    thinking: bool | ThinkingMode | None = None,
) -> dict[str, Any]:
    """Return the variables of a chat template, with the one for thinking.

    Args:
        template: the model's chat template.
        variables: variables that the request gives; they win.
        enable_thinking: the field of that name.
        thinking: the field of that name.

    Raises:
        RequestError: the fields contradict each other, or the template has no such variable.
    """
    variables = dict(variables or {})
    name, enabled = "enable_thinking", enable_thinking
    if (mode := _enabled(thinking)) is not None:
        if enabled not in (None, mode):
            raise RequestError("enable_thinking and thinking: expected one of them, got both")
        name, enabled = ("thinking" if enabled is None else name), mode
    if enabled is None or not _THINKING.keys().isdisjoint(variables):
        return variables
    if (variable := _thinking_variable(template)) is not None:
        return {variable: enabled, **variables}
    raise RequestError(
        f"{name}: not supported: the model's chat template has no variable "
        f"{' or '.join(_THINKING)}; leave the field out"
    )


def drop_thinking(body: T, template: Callable[[], str | None]) -> tuple[T, Sequence[str]]:
    """Return a request without its fields for thinking if the template has no such variable.

    A budget of tokens stays, and so do fields that contradict each other.

    Args:
        template: returns the model's chat template.

    Returns:
        The request and the names of the fields that it has lost.
    """
    changes: dict[str, Any] = {}
    modes: set[Any] = set()
    for name in _THINKING:
        value = getattr(body, name, None)
        mode = _enabled(value) if isinstance(value, bool | ThinkingMode) else value
        if mode is not None:
            modes.add(mode if isinstance(mode, bool) else name)
            changes[name] = None
            if isinstance(value, ThinkingMode):
                changes[name] = msgspec.structs.replace(value, type="auto")
    if modes not in ({True}, {False}) or _thinking_variable(template()) is not None:
        return body, ()
    return msgspec.structs.replace(body, **changes), tuple(changes)


def _thinking_variable(template: str | None) -> str | None:
    """Return the name of a template's variable for thinking; None without one."""
    for variable, use in _THINKING.items():
        if template is not None and use.search(template):
            return variable
    return None


def _enabled(thinking: bool | ThinkingMode | None) -> bool | None:
    if not isinstance(thinking, ThinkingMode):
        return thinking
    return {"enabled": True, "disabled": False}.get(thinking.type)


def check_truncation_side(side: str | None, limit: int | None, *, of_pairs: bool) -> None:
    """Check the side on which a prompt is cut.

    Args:
        side: the field `truncation_side`; None leaves it to the server.
        limit: the field `truncate_prompt_tokens`; without it nothing is cut.
        of_pairs: whether the model reads texts in pairs, of which the longer one loses its end.

    Raises:
        RequestError: prompts are cut on the other side.
    """
    expected = "right" if of_pairs else "left"
    if side is not None and limit is not None and side != expected:
        raise RequestError(
            f'truncation_side: expected "{expected}" with truncate_prompt_tokens, got "{side}"'
        )


def _is_of(message: str, plugin: str) -> bool:
    """Return whether an error is about the arguments of a plugin."""
    path = join_path("plugin_args", plugin)
    return message.startswith((f"{path}:", f"{path}."))
