"""The class of an error as a word that can travel, and back."""

from __future__ import annotations

from hardpoint.plugins import HardpointError, RequestError, errors

from .wire import WireError

__all__ = ["error_of", "kind_of"]


def kind_of(error: BaseException) -> str:
    """Return the name of the nearest class of Hardpoint's tree, the root's for all others.

    What cannot be read is told to whoever sent it, for whom it is a wrong request.
    """
    if isinstance(error, WireError):
        return RequestError.__name__
    names = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(names, HardpointError.__name__)


def error_of(kind: str | None, words: str | None) -> HardpointError:
    """Return an error of the class of that name, of the root's if there is none."""
    cls = getattr(errors, kind, HardpointError) if kind in errors.__all__ else HardpointError
    error: HardpointError = cls(words or "the engine gave no reason")
    return error
