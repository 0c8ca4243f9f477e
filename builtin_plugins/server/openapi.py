"""`/openapi.json`: the routes, their bodies and the plugins' arguments as an OpenAPI document."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint.plugins import SamplingParams
from hardpoint.plugins.server import Route
from hardpoint.typed import attribute_docs, schema_components, walk_structs

from .errors import MESSAGES_PATH, ErrorBody, MessagesErrorBody
from .routes.fields import GenerationFields
from .service import Service

_REF = "#/components/schemas/"
_PARAMETER = re.compile(r"{(\w+)(?::(\w+))?}")
_INTRODUCTION = (
    "The API of one model that Hardpoint serves. A field that is null is a field that is left out. "
    "Unknown fields are ignored and listed in the header `x-hardpoint-ignored-fields`, unless "
    "`server.unknown_fields` is `error`; names that nearly match a field are errors. Fields that "
    "are described as ignored change nothing."
)
_ERRORS = {
    400: "A field is wrong; `param` is its path.",
    401: "The key is missing or wrong.",
    403: "The Host, the Origin or the key does not allow this.",
    404: "There is no such route or model.",
    408: "The body stopped.",
    413: "The body is too long.",
    415: "The body is not `application/json`.",
    429: "Too many requests wait; Retry-After says when to send it again.",
    500: "The server or a plugin failed; not to be sent again if x-should-retry is false.",
    503: "The engine is being restarted or the server ends; send it again after Retry-After.",
}
_OF_WEBSOCKETS = {426: "The request opens no WebSocket."}
_STATES = ("/health", "/ready", "/ping")
"""Paths whose answers with 503 have the same form as those with 200, and are no errors."""

_METRICS = "/metrics"
_NULL = {"type": "null"}
_PARAMETER_TYPES = {"int": "integer", "float": "number"}


class OpenAPIRoute:
    """The route of the document."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._document: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the route."""
        summary = "Describe the routes, as OpenAPI 3.1."
        return [
            Route(path="/openapi.json", endpoint=self.describe, summary=summary, is_counted=False)
        ]

    async def describe(self, request: Request) -> Response:  # noqa: ARG002
        """Return the document, which is made once."""
        if self._document is None:
            self._document = msgspec.json.encode(self._described())
        return Response(self._document, media_type="application/json")

    def _described(self) -> dict[str, Any]:
        service = self._service
        return openapi_document(
            service.routes,
            version=service.version,
            arguments=service.engine.plugins.argument_schemas(),
            inputs=service.engine.plugins.io_processor_schemas(),
            open_routes=service.settings.open_routes if service.has_keys else None,
        )


def openapi_document(
    routes: Sequence[Route],
    *,
    version: str,
    arguments: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Mapping[str, Any]],
    open_routes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of some routes.

    Args:
        version: version of Hardpoint.
        arguments: JSON schemas of `plugin_args`, by the names of the plugins.
        inputs: JSON schemas of the inputs of IO processors, by their names.
        open_routes: paths that need no key; None if none needs one.
    """
    names, schemas = schema_components(_types(routes), _REF)
    bodies = (route.request_type for route in routes if route.request_type is not None)
    body_types = {struct for body in bodies for struct in walk_structs(body)}
    for type_, name in names.items():
        if type_ in body_types:
            _allow_null(schemas[name])
        _add_treatment(schemas[name], type_)
    untagged = {_REF + n for type_, n in names.items() if getattr(type_, "tag_is_optional", False)}
    _drop_discriminators(schemas, untagged)
    schemas["PluginArgs"] = {
        "type": "object",
        "description": "Arguments of plugins by name; those of output parsers are not listed.",
        "properties": _of_plugins("PluginArgs", arguments, schemas),
    }
    schemas["IOProcessorData"] = {
        "description": "Input of an IO processor, one of those that are enabled.",
        "anyOf": [
            {"title": plugin, **schema}
            for plugin, schema in _of_plugins("IOProcessorData", inputs, schemas).items()
        ]
        or [{}],
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Hardpoint", "version": version, "description": _INTRODUCTION},
        "paths": _paths(routes, names, open_routes),
        "components": {"schemas": schemas},
    }
    if open_routes is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _types(routes: Iterable[Route]) -> list[type[msgspec.Struct]]:
    types: dict[type[msgspec.Struct], None] = {ErrorBody: None, MessagesErrorBody: None}
    for route in routes:
        for type_ in (route.request_type, route.response_type):
            if type_ is not None:
                types[type_] = None
    return list(types)


def _allow_null(schema: dict[str, Any]) -> None:
    """Let fields that may be left out be null too, which is the same."""
    properties: dict[str, dict[str, Any]] = schema.get("properties", {})
    for name, content in properties.items():
        if name in schema.get("required", ()) or content.get("type") == "null":
            continue
        about: dict[str, Any] = {
            key: content[key] for key in ("description", "default") if key in content
        }
        rest = {key: value for key, value in content.items() if key not in about}
        options = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
        if rest and _NULL not in options:
            properties[name] = {"anyOf": [*options, _NULL], **about}


def _add_treatment(schema: dict[str, Any], type_: type[msgspec.Struct]) -> None:
    properties = schema.setdefault("properties", {})
    # Others have fields of the same names with other meanings.
    shared = attribute_docs(SamplingParams) if issubclass(type_, GenerationFields) else {}
    for name, content in properties.items():
        if name in shared:
            content.setdefault("description", shared[name])
        if name in ("plugin_args", "vllm_xargs"):
            content.pop("type", None)
            content["anyOf"] = [{"$ref": _REF + "PluginArgs"}, {"type": "null"}]
    if getattr(type_, "tag_is_optional", False):
        schema["required"].remove(type_.__struct_config__.tag_field)
    for name, reason in getattr(type_, "ignored", {}).items():
        properties[name] = {"description": f"Ignored: {reason}."}
    if refused := getattr(type_, "refused", {}):
        schema["x-refused"] = dict(refused)


def _drop_discriminators(value: Any, untagged: Set[str]) -> None:
    """Remove the discriminators of unions with a type that has an optional tag.

    Args:
        untagged: references to such types.
    """
    if isinstance(value, dict):
        discriminator = value.get("discriminator")
        if isinstance(discriminator, dict) and not untagged.isdisjoint(
            discriminator.get("mapping", {}).values()
        ):
            del value["discriminator"]
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            _drop_discriminators(item, untagged)


def _of_plugins(
    name_prefix: str, by_plugin: Mapping[str, Mapping[str, Any]], schemas: dict[str, Any]
) -> dict[str, Any]:
    """Return schemas by plugin; types that they refer to are put into `schemas`.

    Args:
        name_prefix: beginning of the names of these types.
    """
    moved: dict[str, Any] = {}
    for plugin, plugin_schema in by_plugin.items():
        schema = copy.deepcopy(dict(plugin_schema))
        prefix = f"{name_prefix}_{re.sub(r'[^A-Za-z0-9_-]', '_', plugin)}_"
        definitions = schema.pop("$defs", {})
        for name, definition in definitions.items():
            schemas[prefix + name] = _moved(definition, prefix)
        moved[plugin] = _moved(schema, prefix)
    return moved


def _moved(value: Any, prefix: str) -> Any:
    if isinstance(value, dict):
        return {
            name: _REF + prefix + item.removeprefix("#/$defs/")
            if name == "$ref" and isinstance(item, str)
            else _moved(item, prefix)
            for name, item in value.items()
        }
    return [_moved(item, prefix) for item in value] if isinstance(value, list) else value


def _paths(
    routes: Iterable[Route],
    names: Mapping[type[msgspec.Struct], str],
    open_routes: Sequence[str] | None,
) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        item = paths.setdefault(path, {})
        for method in route.methods:
            operation = _operation(route, names)
            operation["operationId"] = "_".join([method.lower(), *re.findall(r"\w+", path)])
            if open_routes is not None and route.path in open_routes:
                operation["security"] = []
            item[method.lower()] = operation
    return paths


def _operation(route: Route, names: Mapping[type[msgspec.Struct], str]) -> dict[str, Any]:
    def content(type_: type[msgspec.Struct]) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": _REF + names[type_]}}}

    answer = _answer(route)
    if route.response_type is not None:
        answer["content"] = content(route.response_type)
    operation: dict[str, Any] = {"summary": route.summary or route.path}
    if parameters := [_parameter(name, kind) for name, kind in _PARAMETER.findall(route.path)]:
        operation["parameters"] = parameters
    if route.request_type is not None:
        operation["requestBody"] = {"required": True, "content": content(route.request_type)}
        if "stream" in route.request_type.__struct_fields__ and "content" in answer:
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation["responses"] = {"101" if route.websocket else "200": answer}
    is_messages = route.path == MESSAGES_PATH or route.path.startswith(f"{MESSAGES_PATH}/")
    error = content(MessagesErrorBody if is_messages else ErrorBody)
    errors = _ERRORS | _OF_WEBSOCKETS if route.websocket else _ERRORS
    for status, meaning in errors.items():
        response: dict[str, Any] = {"description": meaning}
        if status != 503 or route.request_type is not None:
            response["content"] = error
        elif route.path in _STATES and "content" in answer:
            response["content"] = answer["content"]
        operation["responses"][str(status)] = response
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if route.websocket:
        return {"description": "The connection is a WebSocket from here on."}
    answer: dict[str, Any] = {"description": "The answer."}
    if route.path == _METRICS:
        answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return answer


def _parameter(name: str, kind: str) -> dict[str, Any]:
    schema = {"type": _PARAMETER_TYPES.get(kind, "string")}
    return {"name": name, "in": "path", "required": True, "schema": schema}
