"""Arguments of requests, drawn from nothing but their declared type."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Hashable
from typing import Any, TypeAlias

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as types

_TOKENS = 100  # below each suite's vocabulary, as many numbers are token ids
_MOST = 4  # items of a collection, characters of a text
_MOST_MULTIPLES = 1000  # of a float

_Classes: TypeAlias = tuple[type, ...]


class UndrawnError(Exception):
    """No values are drawn for a type.

    Attributes:
        field: path of the field that has it.
    """

    def __init__(self, field: str = "") -> None:
        """Create an error; the path is empty for the type itself."""
        super().__init__(field)
        self.field = field


def arguments_of(declared: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, object]] | None:
    """Return a strategy for a type's plain data; None if it has no fields.

    A field with a default is left out now and then.

    Raises:
        UndrawnError: the type of a field without a default is too special.
    """
    info = types.type_info(declared)
    assert isinstance(info, types.StructType)
    return _structs(info, ()) if info.fields else None


def _structs(info: types.StructType, outer: _Classes) -> st.SearchStrategy[dict[str, object]]:
    """Return a strategy for the plain data of a struct in others."""
    if info.array_like or info.cls in outer:
        raise UndrawnError
    required: dict[str, st.SearchStrategy[object]] = {}
    optional: dict[str, st.SearchStrategy[object]] = {}
    if info.tag_field is not None:
        required[info.tag_field] = st.just(info.tag)
    for field in info.fields:
        try:
            values = _values(field.type, (*outer, info.cls))
        except UndrawnError as error:
            if field.required:
                path = f"{field.encode_name}.{error.field}" if error.field else field.encode_name
                raise UndrawnError(path) from None
        else:
            (required if field.required else optional)[field.encode_name] = values
    drawn = st.fixed_dictionaries(required, optional=optional)
    if hasattr(info.cls, "__post_init__"):
        return drawn.filter(functools.partial(_is_accepted, info.cls))
    return drawn


def _is_accepted(cls: type, values: object) -> bool:
    """Return whether the checks of a struct's own accept plain data."""
    try:
        msgspec.convert(values, cls)
    except msgspec.ValidationError:
        return False
    return True


def _values(info: types.Type, outer: _Classes) -> st.SearchStrategy[Any]:
    match info:
        case types.Metadata(type=inner):
            return _values(inner, outer)
        case types.StructType():
            return _structs(info, outer)
        case types.UnionType(types=members):
            return _choices(members, outer)
        case types.TupleType(item_types=items):
            return st.tuples(*(_values(item, outer) for item in items)).map(list)
        case types.CollectionType() | types.DictType():
            return _collections(info, outer)
    return _values_of_scalar(info)


def _choices(members: tuple[types.Type, ...], outer: _Classes) -> st.SearchStrategy[Any]:
    strategies = []
    for member in members:
        with contextlib.suppress(UndrawnError):
            strategies.append(_values(member, outer))
    if not strategies:
        raise UndrawnError
    return st.one_of(strategies)


def _collections(
    info: types.CollectionType | types.DictType, outer: _Classes
) -> st.SearchStrategy[Any]:
    least = info.min_length or 0
    limit = least + _MOST if info.max_length is None else min(least + _MOST, info.max_length)
    if isinstance(info, types.DictType):
        if isinstance(info.key_type, types.TupleType | types.CollectionType | types.StructType):
            raise UndrawnError  # drawn as lists and dicts, which are no keys
        keys, values = _values(info.key_type, outer), _values(info.value_type, outer)
        return st.dictionaries(keys, values, min_size=least, max_size=limit)
    items = _values(info.item_type, outer)
    if isinstance(info, types.SetType | types.FrozenSetType):
        return st.lists(items, min_size=least, max_size=limit, unique_by=_identity)
    return st.lists(items, min_size=least, max_size=limit)


def _identity(item: object) -> Hashable:
    return repr(item) if isinstance(item, dict | list) else item


def _values_of_scalar(info: types.Type) -> st.SearchStrategy[Any]:
    match info:
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.LiteralType(values=choices):
            return st.sampled_from(choices)
        case types.EnumType(cls=cls):
            return st.sampled_from([member.value for member in cls])
        case types.StrType():
            return _texts(info)
        case types.IntType():
            return _integers(info)
        case types.FloatType():
            return _floats(info)
    raise UndrawnError


def _texts(info: types.StrType) -> st.SearchStrategy[str]:
    least, limit = info.min_length or 0, info.max_length
    if info.pattern is None:
        return st.text("abc ", min_size=least, max_size=least + _MOST if limit is None else limit)
    pattern = re.compile(info.pattern)
    texts = st.from_regex(pattern) | st.from_regex(pattern, fullmatch=True)
    sized = texts.map(lambda text: text.ljust(least, text[-1:] or "a")[:limit])
    return sized.filter(lambda text: pattern.search(text) is not None)


def _integers(info: types.IntType) -> st.SearchStrategy[int]:
    least = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
    limit = info.le if info.le is not None else None if info.lt is None else info.lt - 1
    step = info.multiple_of or 1
    if least is None:
        least = 0 if limit is None or limit >= 0 else limit - _MOST * step
    if limit is None:
        limit = max(_TOKENS, least + _MOST * step)
    return st.integers(-(-least // step), limit // step).map(lambda number: number * step)


def _floats(info: types.FloatType) -> st.SearchStrategy[float]:
    least = info.ge if info.ge is not None else info.gt
    limit = info.le if info.le is not None else info.lt
    step = float(info.multiple_of or 1)
    if least is None:
        least = -_MOST * step if limit is None else min(-_MOST, limit - _room(limit, step))
    if limit is None:
        limit = max(_MOST, least + _room(least, step))
    if info.multiple_of is None:
        return st.floats(
            float(least),
            float(limit),
            exclude_min=info.gt is not None,
            exclude_max=info.lt is not None,
            allow_subnormal=False,
        )
    factors = range(math.ceil(least / step), math.floor(limit / step) + 1)[:_MOST_MULTIPLES]
    multiples = [
        number
        for number in (factor * step for factor in factors)
        if least <= number <= limit
        and number not in (info.gt, info.lt)
        and math.fmod(number, step) == 0  # which 3 * 0.1 is not, for msgspec
    ]
    if not multiples:
        raise UndrawnError
    return st.sampled_from(multiples)


def _room(bound: float, step: float) -> float:
    """Return the width of a range that has a bound and multiples of a step."""
    return max(_MOST * step, abs(bound))
