"""Pickle support for msgspec Struct classes: their parts, and a class made from the parts."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

MSGSPEC_CACHE = "__msgspec_cache__"
"""The class attribute in which msgspec caches the decoded layout of a class."""

_PLAIN_FACTORIES = (list, dict, set, bytearray)
_OPTIONS = (
    "frozen",
    "eq",
    "order",
    "array_like",
    "gc",
    "repr_omit_defaults",
    "omit_defaults",
    "forbid_unknown_fields",
    "weakref",
    "dict",
    "cache_hash",
    "tag",
    "tag_field",
)
_SET_BY_STATEMENT = {"__module__", "__doc__", "__orig_bases__"}
_MADE_BY_MSGSPEC = {
    MSGSPEC_CACHE,
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dict__",
    "__match_args__",
    "__slots__",
    "__weakref__",
    "_abc_impl",
}


@dataclass(frozen=True)
class StructParts:
    """The parts of a Struct class, in two steps because a class may refer to itself.

    Attributes:
        layout: the parts that the class statement needs; arguments of `build_struct`.
        content: the parts that may refer to the class, such as types of fields and methods; the
            second argument of `fill_struct`.
    """

    layout: tuple[Any, ...]
    content: tuple[Any, ...]

    @classmethod
    def of(cls, struct: type[msgspec.Struct]) -> StructParts:
        """Return the parts of a class.

        Raises:
            NameError: an annotation of a field names something that does not exist.
        """
        annotations = inspect.get_annotations(struct)
        by_name = {field.name: field for field in msgspec.structs.fields(struct)}
        fields = [by_name[name] for name in annotations if name in by_name]
        namespace = {k: v for k, v in vars(struct).items() if k in _SET_BY_STATEMENT}
        namespace["__qualname__"] = struct.__qualname__
        skipped = {*_SET_BY_STATEMENT, *_MADE_BY_MSGSPEC, *(field.name for field in fields)}
        attributes = {k: v for k, v in vars(struct).items() if k not in skipped}
        # The class statement gets a stand-in for each callable that may refer to the class; the
        # pickle holds the stand-in in both steps, as one object, so that the second one fills it.
        stand_ins: list[tuple[_Deferred, Callable[..., Any]]] = []

        def deferred(target: Callable[..., Any]) -> _Deferred:
            stand_ins.append((_Deferred(), target))
            return stand_ins[-1][0]

        arguments = {}
        for field in fields:
            factory = field.default_factory
            if isinstance(factory, _Deferred):  # of a class that was itself built from parts
                factory = factory.target
            if factory is not msgspec.NODEFAULT and factory not in _PLAIN_FACTORIES:
                factory = deferred(factory)
            arguments[field.name] = {
                "name": field.encode_name,
                "default": field.default,
                "default_factory": factory,
            }
        if "__post_init__" in attributes:
            namespace["__post_init__"] = deferred(attributes["__post_init__"])
        statement = (type(struct), struct.__name__, struct.__bases__)
        types = {field.name: field.type for field in fields}
        return cls(
            (statement, namespace, arguments, _options_of(struct, arguments)),
            (types, stand_ins, attributes),
        )


def build_struct(
    statement: tuple[type, str, tuple[type, ...]],
    namespace: dict[str, Any],
    arguments: dict[str, dict[str, Any]],
    options: dict[str, Any],
) -> type[msgspec.Struct]:
    """Return a class with names, order and defaults of fields, but no types yet.

    Args:
        statement: metaclass, name and bases.
        namespace: attributes other than the fields.
        arguments: those of `msgspec.field`, by field.
        options: options of the class statement.
    """
    metaclass, name, bases = statement
    fields = {field: msgspec.field(**field_options) for field, field_options in arguments.items()}
    body = {**namespace, "__annotations__": dict.fromkeys(arguments, Any), **fields}
    return typing.cast("type[msgspec.Struct]", metaclass(name, bases, body, **options))


def fill_struct(struct: type[msgspec.Struct], content: tuple[Any, ...]) -> type[msgspec.Struct]:
    """Give a class from `build_struct` its types, its attributes and the targets of stand-ins."""
    types, stand_ins, attributes = content
    struct.__annotations__ = types  # msgspec reads them when it first converts
    for stand_in, target in stand_ins:
        stand_in.target = target
    for name, value in attributes.items():
        setattr(struct, name, value)
    return struct


def make_meta(fields: dict[str, Any]) -> msgspec.Meta:
    """Return a `Meta` with the given fields."""
    return msgspec.Meta(**fields)


def make_new_type(name: str, module: str, supertype: Any) -> Any:
    """Return a `NewType`."""
    made = typing.NewType(name, supertype)  # type: ignore[misc] # its name is not a literal
    made.__module__ = module
    return made


class _Deferred:
    """A callable with a target that is set later."""

    # msgspec looks for default factories and `__post_init__` when a class is made, and never again.

    target: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.target(*args)


def _options_of(struct: type[msgspec.Struct], arguments: dict[str, Any]) -> dict[str, Any]:
    options = {name: getattr(struct.__struct_config__, name) for name in _OPTIONS}
    if options["tag"] is None:
        options["tag"] = False
    positional = struct.__match_args__
    options["kw_only"] = bool(arguments) and not any(name in positional for name in arguments)
    return options
