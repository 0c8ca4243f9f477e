"""What goes on while the engine is paused: whoever has begun may end, where that is wanted."""

from __future__ import annotations

from hardpoint.plugins import PauseState, RequestStatus

from . import reasons
from .admission import admit_one, is_full
from .live import LiveRequest
from .step import Step
from .tracker import Books


def admit_begun(books: Books, step: Step) -> None:
    """Admit those that ran or were loaded before, oldest first; the policy is not asked."""
    for request in sorted(_waiting_begun(books), key=lambda request: request.order):
        if is_full(books, step) or not admit_one(books, request, step):
            break
    step.stopped = step.stopped or reasons.paused()


def holds(books: Books, state: PauseState, request: LiveRequest) -> bool:
    """Whether a pause is why a request gets no tokens."""
    if state is PauseState.PAUSED_NEW:
        return request.request_id not in books.running and not _has_begun(books, request)
    return state is PauseState.PAUSED_ALL


def is_busy(books: Books, state: PauseState) -> bool:
    """Whether a step has anything to do, though the engine is paused."""
    if books.untold or books.ended or books.lingering:
        return True
    if books.is_overdue(books.context.clock()):
        return True
    if any(r.status is RequestStatus.WAITING_FOR_REMOTE_KV for r in books.blocked.values()):
        return True  # what loads is not to be disturbed
    if state is PauseState.PAUSED_NEW:
        return bool(books.running or _waiting_begun(books))
    return False


def _waiting_begun(books: Books) -> list[LiveRequest]:
    return [request for request in books.waiting if _has_begun(books, request)]


def _has_begun(books: Books, request: LiveRequest) -> bool:
    return request.num_preemptions > 0 or request.request_id in books.loaded
