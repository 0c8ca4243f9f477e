"""Names of the fields of requests in errors of the engine, which has its own names for some."""

from __future__ import annotations

import re

_PATHS = {
    "response_format.json": "response_format.json_schema.schema",
    "response_format.json_object": "response_format",
    "response_format.structural_tag": "response_format",
    "text.format.json": "text.format.schema",
    "text.format.json_object": "text.format",
    "output_config.format.json": "output_config.format.schema",
    **{
        f"guided_{part}.{part}": f"guided_{part}" for part in ("json", "regex", "choice", "grammar")
    },
    "regex.regex": "regex",
    "ebnf.grammar": "ebnf",
    "grammar.grammar": "grammar",
    "json_schema.json": "json_schema",
    "tools.structural_tag": "tools",
}
"""Where the parts of what an answer must be are in a request."""

_LENIENT = "; structured_outputs with `lenient: true` checks it at the end instead"
_STRICT = "; `strict: false` checks it at the end instead"
_ADVICE = {
    "response_format": _STRICT,
    "text.format": _STRICT,
    "output_config.format": _LENIENT,
    "guided_json": _LENIENT,
    "json_schema": _LENIENT,
    "structured_outputs": "; `lenient: true` checks it at the end instead",
    "tools": "; `strict: false` of the tool leaves it out",
}
"""What to do about a keyword of a schema that is not enforced, by the field that has it."""

# After the path comes the name of the grammar backend, where it is the one that refuses.
_OF_GRAMMAR = re.compile(r"structured(?:\.(\w+))?: (?:[\w.-]+: )?")
_WITH_LENIENT = re.compile(r"; with `lenient`, [^;]*\Z")
_PROMPT = re.compile(r"^prompt(?=[:\[])")
_LIMIT = re.compile(r"(?<![\w.])max_tokens\b")


def is_of_grammar(message: str) -> bool:
    """Return whether an error is about a grammar or a schema."""
    return _OF_GRAMMAR.match(message) is not None


def is_of_request(message: str) -> bool:
    """Return whether the error of a completion is about a field of its request."""
    return is_of_grammar(message) or message.startswith("resumed.")


def grammar_error(message: str, form: str | None = None) -> str:
    """Return an error of the engine about a constraint with the field names of a request.

    Args:
        message: any other is returned as it is.
        form: the field with the form of the answer; None if it is not known.
    """
    if (match := _OF_GRAMMAR.match(message)) is None:
        return message if form is None else message.replace("sampling_params.structured", form)
    part = match[1]
    path = form or "structured"
    if part is not None:
        path = with_own_path(f"{path}.{part}", path)
    advice = _ADVICE.get(form or "", "")
    if path.endswith(" and tools"):
        advice = "; of what is not strict, it is left out"
    rest = _WITH_LENIENT.sub(advice, message[match.end() :])
    return f"{path}: {rest}"


def with_own_path(message: str, form: str) -> str:
    """Return an error of the field `form` with the path that the request has."""
    for path, route_path in _PATHS.items():
        if path.startswith(f"{form}.") and re.match(rf"{re.escape(path)}\b", message):
            return route_path + message.removeprefix(path)
    return message


def own_names(message: str, *, form: str, prompt: str, limit: str, with_calls: bool) -> str:
    """Return an error of the engine with the names that the fields of a request have.

    Args:
        form: the field with the form of the answer.
        with_calls: whether a structural tag is of that and of calls.
        prompt: the field that the prompt is made of.
        limit: the field with the maximum number of tokens.
    """
    if with_calls and message.startswith("structured.structural_tag:"):
        message = message.replace(".structural_tag", "", 1)
        form = f"{form} and tools"
    message = _PROMPT.sub(prompt, grammar_error(message, form))
    return _LIMIT.sub(limit, message)
