"""Taking a msgspec Struct class apart and putting it together in another process."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

MSGSPEC_CACHE = "__msgspec_cache__"
"""Where msgspec keeps what it found out about a class that it converted to."""

_PLAIN_FACTORIES = (list, dict, set, bytearray)
_CONFIG = (
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
_NAMED = {"__module__", "__doc__", "__orig_bases__"}
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
    """What a Struct class is made of.

    Attributes:
        layout: what the class statement needs; arguments of `build_struct`.
        content: what may refer to the class itself, such as types of fields and methods; the
            second argument of `fill_struct`.
    """

    layout: tuple[Any, ...]
    content: tuple[Any, ...]

    @classmethod
    def of(cls, struct: type[msgspec.Struct]) -> StructParts:
        """Take a class apart.

        Raises:
            NameError: an annotation of a field names what does not exist.
        """
        own = inspect.get_annotations(struct)
        fields = {f.name: f for f in msgspec.structs.fields(struct) if f.name in own}
        specs, types = {}, {}
        late: list[tuple[_Late, Any]] = []
        for name in (n for n in own if n in fields):
            field = fields[name]
            types[name] = field.type
            factory = field.default_factory
            if isinstance(factory, _Late):
                factory = factory.target
            if factory is not msgspec.NODEFAULT and factory not in _PLAIN_FACTORIES:
                late.append((_Late(), factory))
                factory = late[-1][0]
            specs[name] = {
                "name": field.encode_name,
                "default": field.default,
                "default_factory": factory,
            }
        named = {name: value for name, value in vars(struct).items() if name in _NAMED}
        named["__qualname__"] = struct.__qualname__
        rest = {
            name: value
            for name, value in vars(struct).items()
            if name not in _NAMED and name not in _MADE_BY_MSGSPEC and name not in fields
        }
        if "__post_init__" in rest:
            late.append((_Late(), rest["__post_init__"]))
            named["__post_init__"] = late[-1][0]
        head = (type(struct), struct.__name__, struct.__bases__)
        return cls((head, named, specs, _config_of(struct, specs)), (types, late, rest))


def build_struct(
    head: tuple[type, str, tuple[type, ...]],
    named: dict[str, Any],
    specs: dict[str, dict[str, Any]],
    config: dict[str, Any],
) -> type[msgspec.Struct]:
    """Make a class whose fields have their names, order and defaults, but no types yet.

    Args:
        head: metaclass, name and bases.
        named: what the class statement sets beside the fields.
        specs: by field the arguments of `msgspec.field`.
        config: options of the class statement.
    """
    metaclass, name, bases = head
    fields = {field: msgspec.field(**spec) for field, spec in specs.items()}
    namespace = {**named, "__annotations__": dict.fromkeys(specs, Any), **fields}
    return typing.cast("type[msgspec.Struct]", metaclass(name, bases, namespace, **config))


def fill_struct(struct: type[msgspec.Struct], content: tuple[Any, ...]) -> type[msgspec.Struct]:
    """Give a class from `build_struct` its types, attributes and what it calls."""
    types, late, rest = content
    struct.__annotations__ = types  # msgspec reads them when it first converts
    for stand_in, target in late:
        stand_in.target = target
    for name, value in rest.items():
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


class _Late:
    """A callable whose target comes later, because it may refer to the class that needs it.

    msgspec looks for default factories and `__post_init__` when a class is made, and never again.
    """

    target: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the target."""
        return self.target(*args)


def _config_of(struct: type[msgspec.Struct], specs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the class statement."""
    config = {name: getattr(struct.__struct_config__, name) for name in _CONFIG}
    if config["tag"] is None:
        config["tag"] = False
    positional = struct.__match_args__
    config["kw_only"] = bool(specs) and not any(name in positional for name in specs)
    return config
