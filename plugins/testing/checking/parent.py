"""The parent of a check: finds the components, starts a child for each, passes on its records."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from hardpoint.errors import (
    HardpointError,
    PluginConflictError,
    PluginNotFoundError,
    install_command,
)
from hardpoint.host.registry.discovery import InstalledPlugin, describe_unknown_kind, discover
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.registry.loading import snake_case
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.typed import suggest

from .request import CANNOT_LOAD, FAILED, OK, CheckLimits, CheckRequest, check_record

_LAST_LINES = 15  # of the output of a child that ended early


def check_plugin(
    config: EngineConfig,
    config_sources: ConfigSources,
    name: str,
    limits: Mapping[str, float],
    options: Mapping[str, Any],
    against: int | None,
) -> Iterator[dict[str, Any]]:
    """Check the components of a name, each in a process of its own; yield records.

    The last record of each component has `record` "result" and its exit code.

    Args:
        config, config_sources: the current configuration.
        name: a name, `kind/name`, an FQCN, or a distribution: all that it offers.
        limits: fields of `CheckLimits`.
        options: as an operator would set them, instead of the configured ones.
        against: version of the contract that the components have to state; None is any accepted.

    Raises:
        HardpointError: pytest or hypothesis is not installed.
        PluginNotFoundError: there is none of that name.
        PluginConflictError: several kinds or distributions have one.
    """
    for needed in ("pytest", "hypothesis"):
        if importlib.util.find_spec(needed) is None:
            raise HardpointError(
                f"plugins check: {needed} is not installed; {install_command('testing')}"
            )
    tree = msgspec.to_builtins(config)
    check_limits = msgspec.convert(dict(limits), CheckLimits)
    all_found = _find(name)
    for plugin in all_found:
        with tempfile.TemporaryDirectory(prefix="hardpoint-check-") as folder:
            request = CheckRequest(
                kind=plugin.kind,
                name=plugin.name,
                value=plugin.value,
                reference=name if len(all_found) == 1 else f"{plugin.kind}/{plugin.name}",
                distribution=plugin.distribution,
                version=plugin.version,
                config=tree,
                config_sources=config_sources.by_path,
                options=options,
                against=against,
                folder=folder,
                sys_path=[entry or str(Path.cwd()) for entry in sys.path],
                limits=check_limits,
            )
            yield from _Run(request).records()


def _find(name: str) -> list[InstalledPlugin]:
    """Return the components of a name; imports none."""
    installed = discover(("vllm.logits_processors",))
    named = [f for f in installed if name in (f.name, f"{f.kind}/{f.name}", f.value)]
    offered = [f for f in installed if _normal(f.distribution) == _normal(name)]
    if offered and not (named and named[0].builtin):
        known = [plugin for plugin in offered if plugin.known_kind]
        if not known:
            raise PluginNotFoundError(
                f"{name} offers nothing to check: {describe_unknown_kind(offered[0].kind)}"
            )
        return known
    if not named and ":" in name:
        module, _, attribute = name.partition(":")
        plugin = snake_case((attribute or module).rpartition(".")[2])
        return [InstalledPlugin("", plugin, name, f"module {module}", "")]
    if not named:
        known_names = sorted({f.name for f in installed} | {f.distribution for f in installed})
        raise PluginNotFoundError(
            f"no installed plugin or package is called {name!r}{suggest(name, known_names)}; "
            f"`hardpoint plugins list` shows them all"
        )
    if named[0].kind not in KINDS:
        raise PluginNotFoundError(f"{named[0].label}: {describe_unknown_kind(named[0].kind)}")
    values = {plugin.value for plugin in named}
    if len(named) > 1 and (len(values) > 1 or len({plugin.name for plugin in named}) > 1):
        choices = ", ".join(f"{f.kind}/{f.name} ({f.value})" for f in named)
        raise PluginConflictError(f"{name!r} could be any of {choices}")
    return named


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


@dataclass
class _Run:
    """A child process and its reports."""

    request: CheckRequest
    planned: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    running: str = ""
    refused: dict[str, Any] | None = None
    has_loaded: bool = False
    has_ended: bool = False
    began: float = field(default_factory=time.monotonic)

    def records(self) -> Iterator[dict[str, Any]]:
        read, write = os.pipe()
        log = Path(self.request.folder) / "output"
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": self._temporary()}
        environ.pop("PYTEST_ADDOPTS", None)
        with log.open("wb") as output, os.fdopen(read, "rb") as records:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-m", "hardpoint.testing.checking", str(write)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write,),
                    cwd=self.request.folder,
                    env=environ,
                    start_new_session=True,
                )
            finally:
                os.close(write)
            try:
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError), child.stdin:
                    child.stdin.write(msgspec.json.encode(self.request))
                for record in self._lines(records):
                    if (shown := self._note(record)) is not None:
                        yield shown
                problem = self._problem(child)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and what it started
                child.wait()
        yield from self._rest(problem, log)

    def _temporary(self) -> str:
        folder = Path(self.request.folder) / "tmp"
        folder.mkdir()
        return str(folder)

    def _lines(self, pipe: IO[bytes]) -> Iterator[dict[str, Any]]:
        received = b""
        while (left := self.began + self.request.limits.seconds - time.monotonic()) > 0:
            if not select.select([pipe], [], [], left)[0]:
                break
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                break
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)
            if self.has_ended or self.refused:  # what it started may hold the pipe open
                break

    def _note(self, record: dict[str, Any]) -> dict[str, Any] | None:
        match record["record"]:
            case "plan":
                self.planned = dict(record["checks"])
            case "begin":
                self.running = record["check"]
            case "refused":
                self.refused = record
            case "end":
                self.has_ended = True
            case other:
                if other == "check":
                    self.outcomes[record["check"]] = record["outcome"]
                    self.running = ""
                self.has_loaded = True
                return record if other == "plugin" else {**record, **self._names()}
        return None

    def _names(self) -> dict[str, str]:
        return {"component": self.request.label}

    def _problem(self, child: subprocess.Popen[bytes]) -> str:
        """Return why the child ended before it had reported all; empty if it has."""
        if self.has_ended or self.refused:
            return ""
        if time.monotonic() - self.began >= self.request.limits.seconds:
            return f"it did not end within {self.request.limits.seconds:g} s"
        code = child.wait()
        if code < 0:
            return f"its process ended with {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _rest(self, problem: str, log: Path) -> Iterator[dict[str, Any]]:
        last = ""
        if problem:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            last = "\n".join([problem, *lines[-_LAST_LINES:]])
        for name in [name for name in self.planned if name not in self.outcomes and problem]:
            is_cause = name == self.running
            outcome = "failed" if is_cause else "not_proved"
            self.outcomes[name] = outcome
            yield {
                **check_record(
                    name,
                    self.planned[name],
                    outcome,
                    reason="" if is_cause else f"the run ended before: {problem}",
                    evidence=last if is_cause else "",
                ),
                **self._names(),
            }
        yield self._result(problem, last)

    def _result(self, problem: str, last: str) -> dict[str, Any]:
        counts = dict.fromkeys(("proved", "failed", "expected_failure"), 0)
        counts |= dict.fromkeys(("not_proved", "not_applicable"), 0)
        for outcome in self.outcomes.values():
            counts[outcome] += 1
        if self.refused is not None:
            code, problem = self.refused["exit_code"], self.refused["problem"]
        elif not self.has_loaded:
            code, problem = CANNOT_LOAD, last
        else:
            code, problem = FAILED if counts["failed"] or problem else OK, last
        seconds = round(time.monotonic() - self.began, 2)
        result = {"record": "result", "exit_code": code, "problem": problem, **counts}
        return {**result, "seconds": seconds, **self._names()}
