"""The roll of a rig's requests: who lives, who ended, and who was told of it."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.plugins import EngineCoreOutputs, FinishReason, SchedulerOutput
from hardpoint.testing.scheduling.checks.names import FINISHED

from .requests import Life

__all__ = ["Roll"]


class Roll:
    """Every request that came, and what is still to be told of those that ended.

    Attributes:
        lives: the newest request of each id.
        untold: by id, requests that ended and of which no plan has told.
    """

    def __init__(self, *, report_finished: bool) -> None:
        """Begin with nobody; `report_finished` is whether clients are told who ended."""
        self.lives: dict[str, Life] = {}
        self.untold: dict[str, list[Life]] = {}
        self._report_finished = report_finished

    @property
    def live(self) -> dict[str, Life]:
        """Return the requests that did not end."""
        return {name: life for name, life in self.lives.items() if not life.ended}

    def expire(self, now: float) -> dict[str, Life]:
        """Excuse those whose deadline has passed; return the others that live."""
        live = {}
        for name, life in self.live.items():
            if life.is_late(now):
                life.excuses.add(FinishReason.TIMEOUT)
            else:
                live[name] = life
        return live

    def take(self, by_client: Mapping[int, EngineCoreOutputs]) -> None:
        """Take what a scheduler has for the clients."""
        for client, outputs in by_client.items():
            for output in outputs.outputs:
                life = self.lives.get(output.request_id)
                if life is None:
                    raise FINISHED.broken(f"there is an output of {output.request_id!r}, unknown")
                life.take(output, client)
                if life.ended and not (life.told or life.perhaps_told):
                    self.untold.setdefault(life.request_id, []).append(life)
            self._take_finished(client, outputs)

    def take_plan(self, plan: SchedulerOutput) -> None:
        """Take what a plan tells the workers of the ends."""
        told = set(plan.finished_request_ids)
        if missing := set(self.untold) - told:
            raise FINISHED.broken(
                f"{sorted(missing)} ended before step {plan.step}, which does not tell of it"
            )
        for request_id in told - set(self.untold):
            life = self.lives.get(request_id)
            if life is None or life.told or not (life.ended or life.may_have_ended):
                state = "was told before" if life is not None and life.told else "has not ended"
                raise FINISHED.broken(
                    f"step {plan.step} tells that {request_id!r} ended: it {state}"
                )
            life.told = True
        for request_id, lives in self.untold.items():
            for life in lives:
                life.told = True
            newest = self.lives[request_id]
            newest.perhaps_told = not newest.ended and newest.may_have_ended
        self.untold.clear()

    def lose_plan(self, plan: SchedulerOutput) -> None:
        """Take it that a plan told nobody: the next one tells again."""
        for request_id in plan.finished_request_ids:
            self.untold.setdefault(request_id, [])

    def _take_finished(self, client: int, outputs: EngineCoreOutputs) -> None:
        told = outputs.finished_requests
        if told is None:
            return
        if not self._report_finished:
            raise FINISHED.broken(f"finished_requests is {told}, but report_finished is off")
        for request_id in told:
            life = self.lives.get(request_id)
            if life is None or life.source.client_index != client or life.reported:
                raise FINISHED.broken(
                    f"client {client} is told that {request_id!r} ended, which is not its own, or "
                    "for the second time"
                )
            life.reported = True
