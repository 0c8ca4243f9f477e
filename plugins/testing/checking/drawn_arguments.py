"""Arguments of requests, drawn from nothing but their declared type."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as types

_TOKENS = 100  # below each suite's vocabulary, as many numbers are token ids
_MOST = 4  # items of a collection, characters of a text


def arguments_of(declared: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, object]] | None:
    """Return a strategy for a type's plain data; None if it has no fields, or one is too special.

    A field with a default is left out now and then.
    """
    info = types.type_info(declared)
    assert isinstance(info, types.StructType)
    if not info.fields:
        return None
    required: dict[str, st.SearchStrategy[object]] = {}
    optional: dict[str, st.SearchStrategy[object]] = {}
    for field in info.fields:
        values = _values(field.type)
        if values is not None:
            (required if field.required else optional)[field.encode_name] = values
        elif field.required:
            return None
    return st.fixed_dictionaries(required, optional=optional)


def _values(info: types.Type) -> st.SearchStrategy[object] | None:
    match info:
        case types.Metadata(type=inner):
            return _values(inner)
        case types.StructType(cls=cls):
            return arguments_of(cls) or (st.just({}) if not info.fields else None)
        case types.UnionType(types=members):
            strategies = [values for member in members if (values := _values(member)) is not None]
            return st.one_of(strategies) if strategies else None
        case types.CollectionType() | types.DictType():
            return _collections(info)
    return _values_of_scalar(info)


def _collections(
    info: types.CollectionType | types.DictType,
) -> st.SearchStrategy[object] | None:
    least = info.min_length or 0
    limit = least + _MOST if info.max_length is None else min(least + _MOST, info.max_length)
    if isinstance(info, types.DictType):
        keys, values = _values(info.key_type), _values(info.value_type)
        if keys is None or values is None:
            return None
        return st.dictionaries(keys, values, min_size=least, max_size=limit)
    items = _values(info.item_type)
    return None if items is None else st.lists(items, min_size=least, max_size=limit)


def _values_of_scalar(info: types.Type) -> st.SearchStrategy[object] | None:
    match info:
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.LiteralType(values=choices):
            return st.sampled_from(choices)
        case types.EnumType(cls=cls):
            return st.sampled_from([member.value for member in cls])
        case types.StrType(min_length=least, max_length=limit):
            least = least or 0
            return st.text("abc ", min_size=least, max_size=limit or least + _MOST)
        case types.IntType():
            return _integers(info)
        case types.FloatType():
            return _floats(info)
    return None


def _integers(info: types.IntType) -> st.SearchStrategy[int]:
    least = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
    limit = info.le if info.le is not None else None if info.lt is None else info.lt - 1
    least = least if least is not None else min(0, limit if limit is not None else 0)
    limit = limit if limit is not None else max(_TOKENS, least)
    step = info.multiple_of or 1
    return st.integers(-(-least // step), limit // step).map(lambda number: number * step)


def _floats(info: types.FloatType) -> st.SearchStrategy[float]:
    least = info.ge if info.ge is not None else info.gt
    limit = info.le if info.le is not None else info.lt
    low = least if least is not None else min(-_MOST, limit if limit is not None else 0)
    high = limit if limit is not None else max(_MOST, low)
    return st.floats(
        low,
        high,
        exclude_min=info.gt is not None and low == info.gt,
        exclude_max=info.lt is not None and high == info.lt,
        allow_subnormal=False,
    )
