"""The errors for requests with too many of something."""

from __future__ import annotations

from hardpoint.plugins import RequestError


def too_many(name: str, limit: int, amount: int) -> RequestError:
    """Return the error for an amount over a limit."""
    return RequestError(f"{name}: expected at most {limit} on this server, got {amount}")


def too_many_prompts(name: str, limit: int, amount: int) -> RequestError:
    """Return the error for the number of prompts of a request."""
    return RequestError(f"{name}: expected at most {limit} prompts, got {amount}")


def too_many_items(
    name: str, limit: int, amount: int, *, before_answer: bool = False
) -> RequestError:
    """Return the error for the number of items of a conversation.

    Args:
        before_answer: whether the items leave no room for an answer.
    """
    more = " before the answer" if before_answer else ""
    return RequestError(
        f"{name}: expected a conversation of at most {limit} items on this server, got "
        f"{amount}{more}"
    )
