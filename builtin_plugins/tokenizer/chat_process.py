"""The program that renders chat templates, in a limited process.

A template is a program of the model's author: it can loop, and one expression of a few characters
can take any amount of time and memory. Requests and answers are JSON. It imports Jinja alone, to
start quickly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

# Names under which templates read a message's reasoning; the first is the standard one.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def compile_template(source: str) -> Template:
    """Compile a template for a sandbox with the functions that transformers offers to templates."""
    from jinja2 import TemplateError, nodes  # noqa: PLC0415
    from jinja2.exceptions import SecurityError  # noqa: PLC0415
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.parser import Parser  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415
    from jinja2.utils import Namespace  # noqa: PLC0415

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text; it has no effect here."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    class PlainNamespace(Namespace):
        """A namespace without names that begin with an underscore, which Python's own are."""

        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **fields).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"namespace: expected names without a leading _, got {name!r}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = PlainNamespace
    return environment.from_string(source)


class _TooLongError(ValueError):
    """A text is longer than allowed."""


def render(template: Template, request: dict[str, Any], max_characters: int) -> str:
    """Return a template's text for the variables of a request.

    Raises:
        _TooLongError: it is longer than `max_characters`.
        Exception: the template raises anything.
    """
    pieces, size = [], 0
    for piece in template.generate(**_variables(request)):
        pieces.append(piece)
        size += len(piece)
        if size > max_characters:
            raise _TooLongError(
                f"its text is longer than {max_characters} characters (template_characters)"
            )
    return "".join(pieces)


def _variables(request: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a request; a message's reasoning has all the names it is read by."""
    messages = []
    for message in request["messages"]:
        reasonings = [message[name] for name in _REASONING_FIELDS if message.get(name) is not None]
        if reasonings:
            message = {"thinking": reasonings[0], **message, "reasoning_content": reasonings[0]}
        messages.append(message)
    return {"tools": None, "documents": None, **request, "messages": messages}


def _adapted(messages: list[dict[str, Any]], error: Exception) -> list[dict[str, Any]]:
    """Return messages with calls in another form, as the error of the template asks for.

    Mistral's templates want ids of nine characters, and templates of DeepSeek's R1 and V3.1 join
    arguments to a text.
    """

    def short(call_id: Any) -> Any:
        if not isinstance(call_id, str) or re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def as_text(function: Any) -> Any:
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return function
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}

    changes: dict[str, Callable[[Any], Any]] = {}
    if "length 9" in str(error):
        changes = {"id": short}
    elif isinstance(error, TypeError):
        changes = {"function": as_text}
    adapted = []
    for message in messages:
        message = dict(message)
        if "id" in changes and "tool_call_id" in message:
            message["tool_call_id"] = short(message["tool_call_id"])
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [
                {**call, **{name: of(call[name]) for name, of in changes.items() if name in call}}
                if isinstance(call, dict)
                else call
                for call in calls
            ]
        adapted.append(message)
    return adapted


def answer(
    compiled: Callable[[str], Template], request: bytes, max_characters: int
) -> dict[str, str]:
    """Return the answer to one request: its text, or its error."""
    fields = json.loads(request)
    try:
        template = compiled(fields.pop("template"))
        try:
            return {"text": render(template, fields, max_characters)}
        except Exception as error:
            if (adapted := _adapted(fields["messages"], error)) == fields["messages"]:
                raise
            return {"text": render(template, {**fields, "messages": adapted}, max_characters)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template is a program: it can raise anything
        kind, text = type(error).__name__, str(error)[:1000]
        # The message of a template's raise_exception is meant for the caller.
        is_meant = text and kind in ("TemplateError", _TooLongError.__name__)
        return {"error": text if is_meant else f"it failed: {kind}: {text}"}


def start(settings: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return the function that answers requests.

    Args:
        settings: `max_characters`, the maximum length of an answer.
    """
    compiled = lru_cache(maxsize=8)(compile_template)
    compiled("")  # imports the modules of compilation
    max_characters = settings["max_characters"]
    return lambda request: json.dumps(answer(compiled, request, max_characters)).encode()
