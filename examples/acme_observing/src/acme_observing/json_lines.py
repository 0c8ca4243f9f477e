"""A sink: the state of the engine, and each request that ended, as lines of JSON."""

from __future__ import annotations

import msgspec

from hardpoint import plugins
from hardpoint.plugins import ConfigError, IterationStats, StatSink, StatSinkContext


class JsonLines(StatSink):
    """Appends a line of JSON for each request that ended, with all that is known of it.

    Lines are collected in `record`, which the steps wait for, and written in `report`.
    """

    contract = 1

    class Options(plugins.Options):
        """`path`: the file."""

        path: str = "requests.jsonl"

    options: Options

    def __init__(self, context: StatSinkContext) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        super().__init__(context)
        try:
            self._file = open(self.options.path, "ab")  # noqa: SIM115 - closed in close
        except OSError as cause:
            raise ConfigError(f"plugin.{self.name}.path: cannot be written: {cause}") from cause
        self._lines: list[bytes] = []

    def record(self, stats: IterationStats) -> None:
        """Keep a line per request that ended."""
        for request in stats.finished:
            fields = {"finish_reason": request.finish_reason, "tags": dict(request.tags)}
            self._lines.append(msgspec.json.encode(fields | msgspec.to_builtins(request.metrics)))

    def report(self) -> None:
        """Write the lines."""
        lines, self._lines = self._lines, []
        if lines and not self._file.closed:
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.report()
        self._file.close()
