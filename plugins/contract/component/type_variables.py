"""Type variables of the interfaces, which give editors the types of a plugin's inputs.

Each stands for Any where an annotation leaves it out: `rows: Rows` and
`rows: Rows[Arguments, History]` are both right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # before Python 3.13 only type checkers' own TypeVar has a default
    import typing_extensions

    ArgumentsT_co = typing_extensions.TypeVar("ArgumentsT_co", covariant=True, default=Any)
    StateT_co = typing_extensions.TypeVar("StateT_co", covariant=True, default=Any)
    CacheT = typing_extensions.TypeVar("CacheT", default=Any)
    PlanT = typing_extensions.TypeVar("PlanT", default=Any)
else:
    ArgumentsT_co = TypeVar("ArgumentsT_co", covariant=True)
    StateT_co = TypeVar("StateT_co", covariant=True)
    CacheT = TypeVar("CacheT")
    PlanT = TypeVar("PlanT")
