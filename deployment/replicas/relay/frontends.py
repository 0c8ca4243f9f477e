"""Live changes of the frontends that share engines: all of them prepare one before any commits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.host.boundary.errors import error_of
from hardpoint.host.live.change import Action, LiveChange, PreparedChange, Switch
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.host.registry.plugin_set import PluginSet

from .messages import Notice

CHANGE, REPLAY = "change", "replay"
"""Topics of notices: a step of a change, and a whole one that was committed before."""


class FrontendChanges:
    """Lets the frontends of other processes follow live changes; a `Slot` of the engines' owner."""

    def __init__(
        self,
        links: Callable[[], Collection[str]],
        notify: Callable[[Notice, Collection[str]], None],
        committed: Callable[[Notice, Collection[str]], None],
    ) -> None:
        """Begin without a change.

        Args:
            links: returns the tokens of the frontends that read notices.
            notify: sends a notice to some frontends, by their tokens.
            committed: sends a notice to all frontends but some, now and once they connect.
        """
        self._links, self._notify, self._committed = links, notify, committed
        self._answers: dict[int, dict[str, tuple[str | None, str]]] = {}
        self._answered = threading.Condition()
        self._numbers = itertools.count(1)

    def answer(self, token: str, number: int, kind: str | None, text: str) -> None:
        """Take a frontend's answer: None if it has prepared the change, or else why it cannot.

        Args:
            token: the frontend's.
            number: number of the change; answers to an earlier one, which is undone, do not count.
            kind: kind of the error; None without one.
            text: text of the error.
        """
        with self._answered:
            if number in self._answers:
                self._answers[number][token] = kind, text
            self._answered.notify_all()

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange:
        """Let all frontends prepare a change.

        Raises:
            HardpointError: one cannot, or does not answer in time.
        """
        del plugins
        number, request = next(self._numbers), msgspec.to_builtins(change.asked)
        taking_part = set(self._links())

        def send(action: Action, value: object = None) -> None:
            self._notify(Notice(CHANGE, [action, number, value]), taking_part)

        def keep() -> None:
            send("keep")
            self._committed(Notice(REPLAY, request), taking_part)

        answers = self._answers[number] = {}
        send("prepare", request)
        try:
            self._wait(answers, taking_part, change.config.plugins.change_seconds)
        except BaseException:
            send("undo")
            raise
        finally:
            del self._answers[number]
        return Switch(lambda is_new: send("commit") if is_new else None, keep, lambda: send("undo"))

    def _wait(
        self,
        answers: Mapping[str, tuple[str | None, str]],
        tokens: Collection[str],
        seconds: float,
    ) -> None:
        ends = time.monotonic() + seconds
        with self._answered:
            while True:
                for kind, text in answers.values():
                    if kind is not None:
                        raise error_of(kind, text)
                waiting = (set(tokens) & set(self._links())) - answers.keys()
                if not waiting:
                    return
                if (left := ends - time.monotonic()) <= 0:
                    raise HardpointError(
                        f"the change was not prepared within {seconds:g} s "
                        f"(plugins.change_seconds) by {len(waiting)} of {len(tokens)} workers of "
                        f"the server; nothing has changed"
                    )
                self._answered.wait(min(left, 0.1))


def asked_of(value: object) -> ChangeRequest:
    """Return the request for a change that a notice carries."""
    return msgspec.convert(value, ChangeRequest)
