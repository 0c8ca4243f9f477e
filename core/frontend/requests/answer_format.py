"""The grammar of a request's calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.core.frontend.outputs.output_parsers import OutputParsers
from hardpoint.plugins import EngineCoreRequest, RequestError, SamplingParams
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


class CallRules(typed.Strict):
    """Which calls of tools a grammar allows.

    Attributes:
        required: names of the tools, one of which has to be called; None requires no call.
        strict: names of the tools whose arguments have to fit their schemas, or the request is
            refused. For others, keywords that the grammar backend cannot enforce are left out.
        parallel: whether there may be several calls. Where no grammar sees to it, later ones are
            left out of the output.
    """

    required: Annotated[list[str], Meta(min_length=1)] | None = None
    strict: list[str] = []
    parallel: bool = True


def is_answered_alike(params: SamplingParams, before: SamplingParams) -> bool:
    """Return whether the answer begins in the same place, after a hook changed parameters."""
    fields = ("structured", "reasoning_parser", "tool_parser")
    return all(getattr(params, name) == getattr(before, name) for name in fields)


def constrain_calls(
    request: EngineCoreRequest,
    parsers: OutputParsers,
    tools: Mapping[str, Mapping[str, Any]],
    calls: CallRules,
    takes_tags: Callable[[str | None], bool],
) -> None:
    """Fill in the grammar of a request whose calls have to keep to one.

    A form of the answer is of its text: with a required call, there is none; otherwise the answer
    is a call or such a text.

    Args:
        request: to fill in.
        parsers: its output parsers.
        tools: JSON schemas of arguments, by the name of the tool.
        calls: rules of the calls.
        takes_tags: returns whether a grammar backend takes structural tags; None is the usual one.

    Raises:
        RequestError: the parser gives no such grammar.
    """
    parser = parsers.tools
    assert parser is not None, "requests with tools are refused where no parser finds calls"
    asked = request.params.structured
    is_free = calls.required is None
    if not _is_due(asked, calls, takes_tags):
        return
    names = tools if calls.required is None else calls.required
    schemas = _schemas(tools, names, calls)
    lenient = schemas.keys().isdisjoint(calls.strict)
    text = None
    if is_free and asked is not None:
        text = _text_format(asked, parsers.content_prefix)
        if asked.json is not None and not asked.lenient:
            lenient = False
            # Of tools that are not strict, no more is asked than without the form of the text.
            schemas = {n: s if n in calls.strict else _names(s) for n, s in schemas.items()}
    try:
        required = text is not None or not is_free
        format = parser.call_format(schemas, required=required, parallel=calls.parallel)
    except RequestError:
        raise
    except (NotImplementedError, ValueError) as cause:
        if text is not None:
            return
        raise RequestError(f"tools: output parser {parser.name!r}: {cause}") from cause
    if text is not None:
        if not _BEGINS_OF_JSON.isdisjoint(_begins(format)):
            return  # nothing would distinguish the two
        format = OrFormat(elements=[format, text])
    structured = StructuredOutputs(
        # One keyword of a strict tool that is left out would be one too many.
        structural_tag=StructuralTag(format=format),
        lenient=lenient,
        backend=None if asked is None else asked.backend,
    )
    request.params = msgspec.structs.replace(request.params, structured=structured)
    markers = (parsers.reasoning or parser).markers()
    request.reasoning_markers = msgspec.structs.replace(markers, content_prefix=())


def _schemas(
    tools: Mapping[str, Mapping[str, Any]], names: Iterable[str], calls: CallRules
) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of some tools.

    Raises:
        RequestError: rules of calls name a tool that there is not.
    """
    if unknown := [name for name in (*names, *calls.strict) if name not in tools]:
        raise RequestError(f"calls: expected names of tools, got {unknown[0]!r}")
    return {name: tools[name] for name in names}


def _is_due(
    asked: StructuredOutputs | None, calls: CallRules, takes_tags: Callable[[str | None], bool]
) -> bool:
    """Return whether a request's grammar is of its calls, or of them and a text."""
    if calls.required is not None:
        return True
    if asked is None:
        return bool(calls.strict)
    # A structural tag may be of calls itself.
    return asked.structural_tag is None and takes_tags(asked.backend)


def _text_format(asked: StructuredOutputs, prefix: str) -> Format:
    """Return the form of a text as a part of a structural tag.

    Args:
        prefix: comes before the text.
    """
    format: Format
    match asked.format:
        case "json":
            assert asked.json is not None
            format = JsonSchemaFormat(json_schema=asked.json)
        case "json_object":
            format = JsonSchemaFormat(json_schema={"type": "object"})
        case "regex":
            format = RegexFormat(pattern=asked.regex or "")
        case "grammar":
            format = GrammarFormat(grammar=asked.grammar or "")
        case _:
            choices = [ConstStringFormat(value=text) for text in asked.choice or ()]
            format = OrFormat(elements=[*choices])
    if not prefix:
        return format
    return SequenceFormat(elements=[ConstStringFormat(value=prefix), format])


def _names(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments with no more than their names and simple types."""
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
            return {begin for one in several for begin in _begins(one)}
    return {""}
