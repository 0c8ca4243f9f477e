"""The grammar of a request's calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins import EngineCoreRequest, RequestError
from hardpoint.plugins.structured import (
    ConstStringFormat,
    Format,
    GrammarFormat,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    StructuralTag,
    StructuredOutputs,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
)

if TYPE_CHECKING:
    from hardpoint.plugins.text.output_parser import ToolCalls


def constrain_calls(
    request: EngineCoreRequest, calls: ToolCalls, takes_tags: Callable[[str | None], bool]
) -> None:
    """Fill in the grammar of a request with constrained calls.

    A form of the answer is of its text: with a required call, there is none; otherwise the answer
    is a call or such a text.

    Args:
        request: to fill in.
        calls: the calls that it may have.
        takes_tags: returns whether a grammar backend takes structural tags; None is the usual one.

    Raises:
        RequestError: the parser gives no such grammar.
    """
    constraint = request.params.structured
    is_free = calls.required is None
    if not _is_due(constraint, calls, takes_tags):
        return
    names = calls.tools if calls.required is None else calls.required
    schemas = _schemas(names, calls)
    lenient = schemas.keys().isdisjoint(calls.strict)
    text = None
    if is_free and constraint is not None:
        text = _text_format(constraint, calls.prefix())
        if constraint.json is not None and not constraint.lenient:
            lenient = False
            # Of tools that are not strict, no more is asked than without the form of the text.
            schemas = {n: s if n in calls.strict else _names(s) for n, s in schemas.items()}
    try:
        required = text is not None or not is_free
        format = calls.parser.call_format(schemas, required=required, parallel=calls.parallel)
    except RequestError:
        raise
    except (NotImplementedError, ValueError) as cause:
        if text is not None:
            return
        raise RequestError(f"tools: output parser {calls.parser.name!r}: {cause}") from cause
    if text is not None:
        if not _BEGINS_OF_JSON.isdisjoint(_begins(format)):
            return  # nothing would distinguish the two
        format = OrFormat(elements=[format, text])
    structured = StructuredOutputs(
        # One keyword of a strict tool that is left out would be one too many.
        structural_tag=StructuralTag(format=format),
        lenient=lenient,
        backend=None if constraint is None else constraint.backend,
    )
    request.params = msgspec.structs.replace(request.params, structured=structured)
    request.reasoning_markers = msgspec.structs.replace(calls.markers(), content_prefix=())


def _schemas(names: Iterable[str], calls: ToolCalls) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of some tools.

    Raises:
        RequestError: rules of calls name a tool that there is not.
    """
    if unknown := [name for name in (*names, *calls.strict) if name not in calls.tools]:
        raise RequestError(f"calls: expected names of tools, got {unknown[0]!r}")
    return {name: calls.tools[name] for name in names}


def _is_due(
    constraint: StructuredOutputs | None, calls: ToolCalls, takes_tags: Callable[[str | None], bool]
) -> bool:
    if calls.required is not None:
        return True
    if constraint is None:
        return bool(calls.strict)
    # A structural tag may be of calls itself.
    return constraint.structural_tag is None and takes_tags(constraint.backend)


def _text_format(constraint: StructuredOutputs, prefix: str) -> Format:
    """Return the form of a text as a part of a structural tag.

    Args:
        prefix: comes before the text.
    """
    format: Format
    match constraint.format:
        case "json":
            assert constraint.json is not None
            format = JsonSchemaFormat(json_schema=constraint.json)
        case "json_object":
            format = JsonSchemaFormat(json_schema={"type": "object"})
        case "regex":
            format = RegexFormat(pattern=constraint.regex or "")
        case "grammar":
            format = GrammarFormat(grammar=constraint.grammar or "")
        case _:
            choices = [ConstStringFormat(value=text) for text in constraint.choice or ()]
            format = OrFormat(elements=[*choices])
    if not prefix:
        return format
    return SequenceFormat(elements=[ConstStringFormat(value=prefix), format])


def _names(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    loose: dict[str, Any] = {"type": "object", "properties": {}}
    for name, of in properties.items():
        type_ = of.get("type") if isinstance(of, Mapping) else None
        loose["properties"][name] = {} if type_ is None else {"type": type_}
    if required := [name for name in schema.get("required", ()) if name in properties]:
        loose["required"] = required
    if properties and schema.get("additionalProperties") is False:
        loose["additionalProperties"] = False
    return loose


_BEGINS_OF_JSON = frozenset('{["-0123456789tfn \t\r\n') | {""}


def _begins(format: Format) -> set[str]:
    """Return the characters that a format's text may begin with; "" is any.

    Special tokens are no characters.
    """
    match format:
        case ConstStringFormat(value=text) | TagFormat(begin=str(text)) if text:
            return {text[0]}
        case TokenFormat() | TagFormat(begin=TokenFormat()):
            return set()
        case TagFormat(content=content):
            return _begins(content)
        case SequenceFormat(elements=[OptionalFormat(content=first), *rest]) if rest:
            return _begins(first) | _begins(SequenceFormat(elements=rest))
        case SequenceFormat(elements=[first, *_]):
            return _begins(first)
        case OrFormat(elements=several) | TagsWithSeparatorFormat(tags=several):
            return {begin for nested in several for begin in _begins(nested)}
    return {""}
