"""Changes of the number of engines that share experts: another set takes the place of all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial

import msgspec

from hardpoint.errors import EngineClosedError, EngineTimeoutError, shown
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.process.client.process_client import EngineStart
from hardpoint.replicas.replica import Replica
from hardpoint.replicas.scaling import Scaling

from .replicas import WaveReplicas, closed_unless_used


class WaveScaling(Scaling):
    """Replaces all engines by the requested number of new ones.

    The experts are divided again, so no engine stays as it is. The engines serve while the others
    start; then they pause by agreement, and their requests go on at the others with the same
    tokens. Whatever fails before that, the engines go on.
    """

    _replicas: WaveReplicas

    def _apply(self, num_added: int, retired: Sequence[int], drain_s: float) -> None:  # noqa: ARG002
        """Replace the engines.

        Raises:
            RequestError: those that are retired do not have the highest ranks.
            HardpointError: the engines do not serve, or do not pause, or others cannot be started.
        """
        ranks = self._replicas.ranks
        num_staying = len(ranks) - len(retired)
        if set(retired) != set(ranks[num_staying:]):
            raise RequestError(
                f"retire: expected the highest of the ranks {', '.join(map(str, ranks))}, since "
                "engines that share experts (parallel.expert) have numbers without gaps, got "
                f"{shown(list(retired))}"
            )
        while not self._try(num_staying + num_added):
            pass  # settings were changed during the start

    def _try(self, count: int) -> bool:
        replicas = self._replicas
        with self._changed:
            before = [replicas.of(rank) for rank in replicas.ranks]
            self._check(before)
            begun = replicas.start
        start = _start_of(begun, count, before)
        check = partial(self._check, before)
        started = replicas.start_together(start, replicas.succeeding(count), check)
        with closed_unless_used(started), self._paused(before), self._changed:
            self._check(before)
            replicas.check_started(started)
            if replicas.start is not begun:
                return False
            replicas.take_over(started, start)
        for replica in before:
            self._move(replica)
            self._report_end(replica)
        with ThreadPoolExecutor(len(before)) as pool:
            list(pool.map(lambda replica: replicas.forget(replica.client), before))
        return True

    def _check(self, before: Sequence[Replica]) -> None:
        """Check that engines serve.

        Raises:
            EngineClosedError: the client was closed.
            HardpointError: one of them does not serve, or is paused.
        """
        with self._changed:
            if self._replicas.is_closed:
                raise EngineClosedError("the engine was closed while it was scaled")
            if not all(
                self._replicas.is_current(replica) and replica.is_serving for replica in before
            ):
                raise HardpointError(
                    "scale: expected engines that serve; one has died, so try again later"
                )
            if any(replica.is_paused for replica in before):
                raise HardpointError(
                    "scale: expected engines that are neither paused nor asleep, because engines "
                    "that share experts (parallel.expert) are replaced by others, which are not"
                )

    @contextlib.contextmanager
    def _paused(self, replicas: Sequence[Replica]) -> Iterator[None]:
        """Pause engines by agreement; resume the ones that serve afterwards.

        Raises:
            EngineTimeoutError: they do not agree in time.
            HardpointError: one has died.
        """
        limit_s = self._replicas.start.config.engine.call_timeout_seconds
        try:
            calls = [replica.open_client.call("pause", "keep", False) for replica in replicas]
            ended = wait(calls, limit_s, FIRST_EXCEPTION)
            for call in ended.done:
                call.result()
            if ended.not_done:
                raise EngineTimeoutError(
                    f"scale: the engines did not pause within {limit_s:g} s "
                    "(engine.call_timeout_seconds)"
                )
            yield
        finally:
            for replica in replicas:
                if replica.is_serving and not replica.is_paused:
                    with contextlib.suppress(HardpointError):
                        replica.open_client.call("resume")


def _start_of(begun: EngineStart, count: int, before: Sequence[Replica]) -> EngineStart:
    """Return the parameters of `count` engines, with caches as large as before."""
    config = begun.config
    num_blocks = min(replica.open_client.ready.num_gpu_blocks for replica in before)
    return dataclasses.replace(
        begun,
        config=msgspec.structs.replace(
            config,
            parallel=msgspec.structs.replace(config.parallel, data=count, local=None),
            kv_cache=msgspec.structs.replace(config.kv_cache, num_blocks=num_blocks),
        ),
    )
