"""The states of conversations that stay open, the tokens that they hold, and their leases.

A conversation has a row and blocks in the engine while a turn runs, and nothing there between two
turns: each turn is a request whose prompt is all tokens before it, which the prefix cache finds.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from hardpoint.errors import ConversationEndedError, PromptTooLongError
from hardpoint.host.system.engine_lock import DeferringLock
from hardpoint.plugins import OverloadedError, RequestError
from hardpoint.plugins.config.engine import ConversationsConfig, EngineConfig

__all__ = [
    "TRANSITIONS",
    "ConversationEvent",
    "ConversationState",
    "History",
    "OpenConversations",
    "open_conversations",
]


class ConversationState(Enum):
    """States of a conversation.

    Attributes:
        IDLE: all its tokens belong to turns that have ended; its lease runs.
        APPENDING: parts have come that no turn has computed; its lease runs.
        RUNNING: a turn runs, and there is no lease.
        ENDED: it holds nothing, and takes nothing.
    """

    IDLE = "idle"
    APPENDING = "appending"
    RUNNING = "running"
    ENDED = "ended"


class ConversationEvent(Enum):
    """Events of a conversation.

    Attributes:
        APPEND: a part of at least one token comes.
        COMMIT: a turn is asked for.
        FINISH: the turn ends, and its tokens are part of the conversation.
        FAIL: the turn ends by an error, and the conversation is as before it.
        CANCEL: the turn is to end early.
        EXPIRE: the time of the lease is up.
        END: the conversation is closed or aborted.
    """

    APPEND = "append"
    COMMIT = "commit"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    END = "end"


_IDLE, _APPENDING = ConversationState.IDLE, ConversationState.APPENDING
_RUNNING, _ENDED = ConversationState.RUNNING, ConversationState.ENDED

TRANSITIONS: Mapping[
    ConversationState, Mapping[ConversationEvent, tuple[ConversationState, ...]]
] = {
    _IDLE: {
        ConversationEvent.APPEND: (_APPENDING,),
        ConversationEvent.COMMIT: (_IDLE,),
        ConversationEvent.CANCEL: (_IDLE,),
        ConversationEvent.EXPIRE: (_ENDED,),
        ConversationEvent.END: (_ENDED,),
    },
    _APPENDING: {
        ConversationEvent.APPEND: (_APPENDING,),
        ConversationEvent.COMMIT: (_RUNNING,),
        ConversationEvent.CANCEL: (_APPENDING,),
        ConversationEvent.EXPIRE: (_ENDED,),
        ConversationEvent.END: (_ENDED,),
    },
    _RUNNING: {
        ConversationEvent.APPEND: (_RUNNING,),
        ConversationEvent.FINISH: (_IDLE, _APPENDING),
        ConversationEvent.FAIL: (_APPENDING,),
        ConversationEvent.CANCEL: (_RUNNING,),
        ConversationEvent.END: (_ENDED,),
    },
    _ENDED: {
        ConversationEvent.FINISH: (_ENDED,),
        ConversationEvent.FAIL: (_ENDED,),
        ConversationEvent.CANCEL: (_ENDED,),
        ConversationEvent.END: (_ENDED,),
    },
}
"""Where events lead; of two states, the second one if parts have come during the turn.

An event that is missing is refused: APPEND and COMMIT with an error, and the others do not occur.
"""


_WITHOUT_LEASE = (ConversationEvent.CANCEL, ConversationEvent.COMMIT)
"""Events that do not begin the lease again."""


class OpenConversations:
    """The open conversations of an engine: how many there are, and how many tokens they hold.

    Leases that have run out are noticed at the next call of any conversation, so that no timer is
    needed. Threads may share it.

    Attributes:
        num_tokens: tokens that the open conversations hold.
        max_model_len: maximum number of tokens of a conversation and its answers.
        lock: held by every transition. The end of a turn or a conversation does not wait for it,
            because it may come from the garbage collector at any moment.
    """

    def __init__(
        self, config: ConversationsConfig, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        """Start without conversations; `clock` is in seconds."""
        self.num_tokens, self.max_model_len = 0, max_model_len
        self.lock = DeferringLock()
        self._config, self._clock = config, clock
        self._count = 0
        self._open: dict[History, None] = {}
        # With a lease, in the order of their deadlines.
        self._idle: collections.OrderedDict[History, float] = collections.OrderedDict()

    def __len__(self) -> int:
        with self.lock:
            self._expire()
            return len(self._open)

    def open(self, request_id: str | None = None, *, keep_last: bool = True) -> History:
        """Open a conversation.

        Args:
            request_id: id of its turns; None numbers it.
            keep_last: whether the last token of a turn, whose keys and values were not computed, is
                part of the conversation.

        Raises:
            OverloadedError: as many are open as may be.
        """
        with self.lock:
            self._expire()
            limit = self._config.max_open
            if len(self._open) >= limit:
                raise OverloadedError(
                    f"conversations.max_open: {limit} conversations are open, its maximum; end "
                    "some, or wait until a lease runs out"
                )
            if request_id is None:
                request_id = f"conversation-{self._count}"
                self._count += 1
            history = History(self, request_id, keep_last=keep_last)
            self._open[history] = None
            self.touch(history)
            return history

    def end(self, request_ids: Iterable[str], why: str) -> None:
        """End the conversations that have one of the ids."""
        with self.lock:
            chosen = set(request_ids)
            for history in [
                conversation for conversation in self._open if conversation.request_id in chosen
            ]:
                history.end(why)

    def end_all(self, why: str) -> None:
        """End all conversations, because the engine ends."""
        with self.lock:
            for history in list(self._open):
                history.is_lost = True
                history.end(why)

    def reserve(self, count: int) -> None:
        """Count tokens of a part.

        Raises:
            OverloadedError: there would be too many.
        """
        self._expire()
        limit = self._config.max_tokens
        if self.num_tokens + count > limit:
            raise OverloadedError(
                f"conversations.max_tokens: open conversations hold {self.num_tokens} tokens, and "
                f"{count} more would be more than {limit}; end some, or wait until a lease runs out"
            )
        self.num_tokens += count

    def touch(self, history: History) -> None:
        """Begin the lease of a conversation again."""
        self._idle[history] = self._clock() + self._config.lease_seconds
        self._idle.move_to_end(history)

    def hold(self, history: History) -> None:
        """Let a conversation have no lease, for a turn."""
        self._idle.pop(history, None)

    def seconds_left(self, history: History) -> float | None:
        """Return the rest of a lease; None if the conversation has none."""
        deadline = self._idle.get(history)
        return None if deadline is None else max(deadline - self._clock(), 0.0)

    def check(self, history: History) -> None:
        """End a conversation after its lease has run out, and others like it."""
        if history in self._idle:
            self._expire()

    def drop(self, history: History, num_tokens: int) -> None:
        """Forget a conversation that has ended."""
        self.num_tokens -= num_tokens
        self._open.pop(history, None)
        self._idle.pop(history, None)

    def _expire(self) -> None:
        now = self._clock()
        while self._idle:
            history, deadline = next(iter(self._idle.items()))
            if deadline > now:
                return
            history.expire(
                f"its lease of {self._config.lease_seconds:g} s has run out "
                "(conversations.lease_seconds)"
            )


def open_conversations(config: EngineConfig, clock: Callable[[], float]) -> OpenConversations:
    """Return the conversations of an engine, none yet."""
    assert isinstance(config.max_model_len, int), "the engine has chosen it"
    return OpenConversations(config.conversations, config.max_model_len, clock)


class History:
    """The tokens of one conversation, and its state.

    Attributes:
        request_id: id of its turns.
        is_lost: whether its lease or the engine has ended it, and no call for that.
        on_end: called once it has ended; None calls nothing.
    """

    __slots__ = (
        "_keep_last", "_later", "_num_done", "_num_turns", "_owner", "_state", "_tokens", "_why",
        "is_lost", "on_end", "request_id",
    )  # fmt: skip

    def __init__(self, owner: OpenConversations, request_id: str, *, keep_last: bool) -> None:
        """Start without tokens; see `OpenConversations.open`."""
        self.request_id, self.is_lost = request_id, False
        self.on_end: Callable[[], object] | None = None
        self._owner, self._keep_last = owner, keep_last
        self._state = ConversationState.IDLE
        self._tokens, self._later = array("i"), array("i")
        self._num_done = self._num_turns = 0  # tokens of turns that have ended, and these turns
        self._why = ""

    @property
    def state(self) -> ConversationState:
        """Its state; ENDED also once its lease has run out."""
        with self._owner.lock:
            self._owner.check(self)
            return self._state

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the turns that have ended."""
        with self._owner.lock:
            return self._tokens[: self._num_done].tolist()

    @property
    def num_turns(self) -> int:
        """The number of turns that have ended, which is the number of the next one."""
        with self._owner.lock:
            return self._num_turns

    @property
    def is_empty(self) -> bool:
        """Whether no part has come yet."""
        return not (self._tokens or self._later)

    @property
    def seconds_left(self) -> float | None:
        """The rest of its lease; None while a turn runs, and once it has ended."""
        with self._owner.lock:
            return self._owner.seconds_left(self)

    def ended(self) -> ConversationEndedError:
        """Return the error of a call after its end."""
        return ConversationEndedError(
            f"the conversation {self.request_id!r} has ended: {self._why}"
        )

    def check_open(self) -> None:
        """Check that it has not ended.

        Raises:
            ConversationEndedError: it has.
        """
        if self.state is ConversationState.ENDED:
            raise self.ended()

    def check_lease(self) -> None:
        """End it if its lease has run out."""
        with self._owner.lock:
            self._owner.check(self)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add a part; while a turn runs, for the next one. Without tokens, do nothing.

        Raises:
            ConversationEndedError: it has ended.
            PromptTooLongError: the model cannot read so many tokens.
            OverloadedError: the open conversations hold too many tokens.
        """
        with self._owner.lock:
            self.check_open()
            if not token_ids:
                return
            have, limit = len(self._tokens) + len(self._later), self._owner.max_model_len
            if have + len(token_ids) >= limit:
                raise PromptTooLongError(
                    f"prompt: the conversation has {have} tokens and this part {len(token_ids)}, "
                    f"which is too long: this model's maximum context length is {limit} tokens, "
                    "less one to generate"
                )
            self._owner.reserve(len(token_ids))
            running = self._state is ConversationState.RUNNING
            (self._later if running else self._tokens).extend(token_ids)
            self._move(ConversationEvent.APPEND)

    def begin(self) -> list[int] | None:
        """Begin a turn; return its prompt, or None without a turn if no part has come.

        Raises:
            ConversationEndedError: it has ended.
            RequestError: a turn runs.
        """
        with self._owner.lock:
            self.check_open()
            if self._state is ConversationState.RUNNING:
                raise RequestError(
                    f"the conversation {self.request_id!r} has a turn that runs; its outputs end "
                    "before another one begins"
                )
            before = self._state
            self._move(ConversationEvent.COMMIT)
            return None if before is ConversationState.IDLE else self._tokens.tolist()

    def cancel(self) -> bool:
        """Return whether there is a turn that can end early."""
        with self._owner.lock:
            self._move(ConversationEvent.CANCEL)
            return self._state is ConversationState.RUNNING

    def finish(self, token_ids: Sequence[int]) -> None:
        """End the turn; its output tokens are part of the conversation."""
        self._owner.lock.call_soon(lambda: self._finish(token_ids))

    def _finish(self, token_ids: Sequence[int]) -> None:
        if self._state is ConversationState.RUNNING:
            turn_tokens = token_ids if self._keep_last else token_ids[:-1]
            self._tokens.extend(turn_tokens)
            self._owner.num_tokens += len(turn_tokens)
            self._num_done = len(self._tokens)
            self._take_later()
            self._num_turns += 1
        self._move(ConversationEvent.FINISH, parts=len(self._tokens) > self._num_done)

    def fail(self) -> None:
        """End the turn; the conversation is as before it, with the parts that came during it."""
        self._owner.lock.call_soon(self._fail)

    def _fail(self) -> None:
        self._take_later()
        self._move(ConversationEvent.FAIL)

    def expire(self, why: str) -> None:
        """End it because its lease has run out."""
        self._why, self.is_lost = why, True
        self._move(ConversationEvent.EXPIRE)

    def end(self, why: str) -> None:
        """End it, in any state."""
        self._owner.lock.call_soon(lambda: self._end(why))

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._move(ConversationEvent.END)

    def _take_later(self) -> None:
        self._tokens.extend(self._later)
        self._later = array("i")

    def _move(self, event: ConversationEvent, *, parts: bool = False) -> None:
        targets = TRANSITIONS[self._state][event]
        before, self._state = self._state, targets[-1 if parts else 0]
        if self._state is ConversationState.ENDED:
            if before is not ConversationState.ENDED:
                self._release()
        elif self._state is ConversationState.RUNNING:
            self._owner.hold(self)
        elif event not in _WITHOUT_LEASE:
            self._owner.touch(self)

    def _release(self) -> None:
        self._owner.drop(self, len(self._tokens) + len(self._later))
        self._tokens, self._later = array("i"), array("i")
        self._num_done = 0
        if self.on_end is not None:
            self.on_end()
