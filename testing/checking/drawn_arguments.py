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
    required, optional = {}, {}
    for field in info.fields:
        values = _values(field.type)
        if values is not None:
            (required if field.required else optional)[field.encode_name] = values
        elif field.required:
            return None
    return st.fixed_dictionaries(required, optional=optional)


def _values(info: types.Type) -> st.SearchStrategy[object] | None:
    """Return a strategy for one type; None if there is none."""
    match info:
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.LiteralType(values=values):
            return st.sampled_from(values)
        case types.EnumType(cls=cls):
            return st.sampled_from([member.value for member in cls])
        case types.StrType(min_length=least, max_length=most):
            least = least or 0
            return st.text("abc ", min_size=least, max_size=most or least + _MOST)
        case types.IntType():
            return _integers(info)
        case types.FloatType():
            return _floats(info)
        case types.StructType(cls=cls):
            return arguments_of(cls) or (st.just({}) if not info.fields else None)
        case types.UnionType(types=members):
            found = [values for member in members if (values := _values(member)) is not None]
            return st.one_of(found) if found else None
        case types.CollectionType(item_type=item, min_length=least, max_length=most):
            values, least = _values(item), least or 0
            if values is None:
                return None
            most = min(least + _MOST, least + _MOST if most is None else most)
            return st.lists(values, min_size=least, max_size=most)
        case types.DictType(key_type=key, value_type=value, min_length=least, max_length=most):
            keys, values, least = _values(key), _values(value), least or 0
            if keys is None or values is None:
                return None
            most = min(least + _MOST, least + _MOST if most is None else most)
            return st.dictionaries(keys, values, min_size=least, max_size=most)
    return None


def _integers(info: types.IntType) -> st.SearchStrategy[int]:
    least = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
    most = info.le if info.le is not None else None if info.lt is None else info.lt - 1
    least = least if least is not None else min(0, most if most is not None else 0)
    most = most if most is not None else max(_TOKENS, least)
    step = info.multiple_of or 1
    return st.integers(-(-least // step), most // step).map(lambda number: number * step)


def _floats(info: types.FloatType) -> st.SearchStrategy[float]:
    least = info.ge if info.ge is not None else info.gt
    most = info.le if info.le is not None else info.lt
    low = least if least is not None else min(-_MOST, most if most is not None else 0)
    high = most if most is not None else max(_MOST, low)
    return st.floats(
        low,
        high,
        exclude_min=info.gt is not None and low == info.gt,
        exclude_max=info.lt is not None and high == info.lt,
        allow_subnormal=False,
    )
