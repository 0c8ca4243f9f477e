"""Sends loads to servers of several settings; what was measured is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from hardpoint.errors import reason_of
from hardpoint.plugins import ConfigError, HardpointError
from hardpoint.simulation import Objective, SimulatedLoad
from hardpoint.typed import Strict, convert, shown

from .load import Traffic
from .measuring import Plan, measure_server
from .prompts import RequestFields
from .server_facts import ServerAddress
from .server_process import ServerStart

_MAX_BYTES = 256 << 20


class SweepPlan(Strict):
    """Loads that are sent to servers of several settings.

    Attributes:
        plan: the loads.
        variants: further settings of each variant, by its name.
        server: the server to start for each variant, with the settings that all have.
        address: a server that runs, instead; there are no variants then.
    """

    plan: Plan
    variants: dict[str, list[str]]
    server: ServerStart = ServerStart()
    address: ServerAddress | None = None

    def checked(self) -> SweepPlan:
        """Return this plan.

        Raises:
            ConfigError, TraceError: something in it is wrong; names it.
        """
        if not self.variants:
            raise ConfigError("variants: expected at least one, got none")
        if self.address is not None and list(self.variants.values()) != [[]]:
            raise ConfigError(
                "variants: expected no settings for a server that runs, which has its own, got "
                f"{shown(next(iter(self.variants.values())))}"
            )
        self.plan.checked()
        return self

    def server_of(self, variant: str) -> ServerStart | ServerAddress:
        """Return the server of a variant."""
        if self.address is not None:
            return self.address
        settings = [*self.server.settings, *self.variants[variant]]
        return msgspec.structs.replace(self.server, settings=settings)


class Point(Strict):
    """One load on one variant.

    Attributes:
        variant: name of the variant.
        load: name of the load.
        settings: further settings of the variant.
        traffic: how the requests were sent.
        report: report of the load, None after an error.
        curves: curves of its plots.
        error: why there is no report; "" if there is one.
        is_whole: whether the load was sent to its end.
    """

    variant: str
    load: str
    settings: list[str]
    traffic: Traffic
    report: dict[str, Any] | None = None
    curves: dict[str, list[float]] = {}
    error: str = ""
    is_whole: bool = True

    @property
    def is_done(self) -> bool:
        """Whether it need not be measured again: a request ended well, and it was sent whole."""
        return self.report is not None and self.is_whole and bool(self.report["finished"])


class _Common(Strict):
    """Settings that all points of a file have in common."""

    load: SimulatedLoad
    fields: RequestFields
    objective: Objective
    model: str | None
    config: str | None
    settings: list[str]
    url: str | None


class SweepFile(Strict):
    """The file of a sweep.

    Attributes:
        format, version: format of the file.
        common: what all points have in common.
        points: what was measured.
    """

    format: Literal["hardpoint sweep"]
    version: Literal[1]
    common: _Common
    points: list[Point] = []


def sweep(
    plan: SweepPlan | Mapping[str, Any], *, output: str | Path, resume: bool = False
) -> Iterator[dict[str, Any]]:
    """Send loads to servers of several settings, which are started one after the other.

    What was measured is written to a file after each point, so that a sweep can go on later. A
    point that fails is one with an error, and the others follow. An interrupt ends the sweep.

    Args:
        plan: the servers and loads, or the fields of `SweepPlan`.
        output: the file.
        resume: whether points that the file has are kept, if they were measured to their end
            without an error; a file that is not there is a new one.

    Yields:
        `{"record": "progress", "variant", "load", "good", "failed", "of", "seconds"}`, with a load
        of "" while a server starts; per point `{"record": "point", "point": Point as plain data,
        "kept": whether it is of the file}`; and at last `{"record": "end", "interrupted"}`.

    Raises:
        ConfigError, TraceError: something given is wrong; names it.
    """
    wanted = convert(msgspec.to_builtins(plan), SweepPlan, path="").checked()
    file = _PointsFile(Path(output), _common(wanted), resume)
    is_interrupted = False
    for variant in wanted.variants:
        kept, missing = [], []
        for traffic in wanted.plan.traffic:
            point = file.done(variant, wanted.variants[variant], traffic)
            if point is None:
                missing.append(traffic)
            else:
                kept.append(point)
        for point in kept:
            yield {"record": "point", "point": msgspec.to_builtins(point), "kept": True}
        if not missing:
            continue
        for record in _measure(wanted, variant, missing):
            if isinstance(record, Point):
                file.add(record)
                is_interrupted = not record.is_whole
                yield {"record": "point", "point": msgspec.to_builtins(record), "kept": False}
            else:
                yield record
        if is_interrupted:
            break
    yield {"record": "end", "interrupted": is_interrupted}


def _measure(
    plan: SweepPlan, variant: str, traffic: Sequence[Traffic]
) -> Iterator[Point | dict[str, Any]]:
    """Yield the points of a variant as they are measured, and progress."""
    left = {one.name: one for one in traffic}

    def point(load: str, **found: Any) -> Point:
        settings = plan.variants[variant]
        return Point(variant=variant, load=load, settings=settings, traffic=left.pop(load), **found)

    progress = {"record": "progress", "variant": variant}
    yield {**progress, "load": "", "good": 0, "failed": 0, "of": None, "seconds": 0.0}
    sent = msgspec.structs.replace(plan.plan, traffic=list(traffic))
    try:
        for record in measure_server(plan.server_of(variant), sent):
            if record["record"] == "progress":
                yield {**record, **progress}
            elif record["record"] == "result":
                yield point(
                    record["load"],
                    report=record["report"],
                    curves=record["curves"],
                    is_whole=not record["interrupted"],
                )
    except HardpointError as error:
        for load in [*left]:
            yield point(load, error=str(error))


def _common(plan: SweepPlan) -> _Common:
    return _Common(
        load=plan.plan.load,
        fields=plan.plan.fields,
        objective=plan.plan.objective,
        model=plan.server.model,
        config=plan.server.config,
        settings=plan.server.settings,
        url=None if plan.address is None else plan.address.url,
    )


class _PointsFile:
    """The file of a sweep, which is whole after each point."""

    def __init__(self, path: Path, common: _Common, resume: bool) -> None:
        self._path, self._common = path, common
        self._points: dict[tuple[str, str], Point] = {}
        if not path.parent.is_dir():
            raise ConfigError(f"output: there is no folder {shown(str(path.parent))}")
        if not path.exists():
            return
        if not resume:
            raise ConfigError(
                f"output: {shown(str(path))} exists: resume goes on with it, or name another file"
            )
        found = _read(path)
        _compare(path, found.common, common)
        self._points = {(point.variant, point.load): point for point in found.points}

    def done(self, variant: str, settings: list[str], traffic: Traffic) -> Point | None:
        """Return a point that need not be measured again."""
        point = self._points.get((variant, traffic.name))
        if point is None or (point.settings, point.traffic) != (settings, traffic):
            return None
        return point if point.is_done else None

    def add(self, point: Point) -> None:
        """Add a point, in the place of an earlier one of its variant and load."""
        self._points[point.variant, point.load] = point
        made = SweepFile(
            format="hardpoint sweep",
            version=1,
            common=self._common,
            points=list(self._points.values()),
        )
        write_whole(self._path, json.dumps(msgspec.to_builtins(made), indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it has its old content or the new one, whatever happens.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"output: {shown(str(path))} cannot be written: {error.strerror}"
        ) from None


def _read(path: Path) -> SweepFile:
    expected = f"output: {shown(str(path))}: expected a file of `hardpoint bench sweep`"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{expected}, got one of more than {_MAX_BYTES} bytes")
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{expected}, {reason_of(error)}") from None
    try:
        return convert(plain, SweepFile, path="")
    except ConfigError as error:
        raise ConfigError(f"{expected}: {error}") from None


def _compare(path: Path, old: _Common, new: _Common) -> None:
    """Refuse to go on with a file of another load or server."""
    plain = msgspec.to_builtins(old), msgspec.to_builtins(new)
    if found := next(_differences(*plain), None):
        place, before, now = found
        raise ConfigError(
            f"output: {shown(str(path))} was made with {place} = {shown(before)}, and not "
            f"{shown(now)}: name another file"
        )


def _differences(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield place and values of what differs in two values of plain data."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(new.keys() - old.keys())]:
            yield from _differences(old.get(name), new.get(name), f"{place}.{name}".lstrip("."))
    elif old != new:
        yield place, old, new
