"""The sink: a table of the requests that ended."""

import csv

from hardpoint import plugins
from hardpoint.plugins import ConfigError, IterationStats, StatSink, StatSinkContext

_COLUMNS = ("tenant", "finish_reason", "prompt_tokens", "output_tokens", "seconds")


class RequestTable(StatSink):
    """Appends a row of CSV for each request that ended.

    Rows are collected in `record`, which the steps wait for, and written in `report`.
    """

    contract = 1

    class Options(plugins.Options):
        """Options.

        Attributes:
            path: the file; it gets a header if it is new.
            tag: tag of requests that names the tenant.
        """

        path: str = "requests.csv"
        tag: str = "tenant"

    options: Options

    def __init__(self, context: StatSinkContext) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        super().__init__(context)
        try:
            self._file = open(self.options.path, "a", newline="")  # noqa: SIM115 - closed in close
        except OSError as cause:
            raise ConfigError(f"plugin.{self.name}.path: cannot be written: {cause}") from cause
        self._rows: list[tuple[object, ...]] = []
        if self._file.tell() == 0:
            self._rows.append(_COLUMNS)

    def record(self, stats: IterationStats) -> None:
        """Keep a row per request that ended."""
        for request in stats.finished:
            metrics = request.metrics
            self._rows.append(
                (
                    request.tags.get(self.options.tag, ""),
                    request.finish_reason,
                    metrics.num_prompt_tokens,
                    metrics.num_generation_tokens,
                    f"{metrics.e2e_seconds:.3f}" if metrics.e2e_seconds is not None else "",
                )
            )

    def report(self) -> None:
        """Write the rows."""
        rows, self._rows = self._rows, []
        if rows and not self._file.closed:
            csv.writer(self._file).writerows(rows)
            self._file.flush()

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.report()
        self._file.close()
