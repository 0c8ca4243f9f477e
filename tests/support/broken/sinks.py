"""Stat sinks with one typical mistake each."""

from __future__ import annotations

import json
import sqlite3
import tempfile

import msgspec

from hardpoint.plugins import StatSink
from support.samples import Sample, leave_thread, spend


class Totals(Sample, StatSink, contract=1):
    """Correct: adds up tokens, and appends them to a file."""

    def __init__(self, context):
        super().__init__(context)
        self.file = tempfile.TemporaryFile("w")  # noqa: SIM115 - close() closes it
        self.tokens = self.seconds = 0

    def record(self, stats):
        self.tokens += stats.num_generation_tokens

    def report(self):
        if not self.file.closed:
            self.file.write(json.dumps({"tokens": self.tokens}) + "\n")

    def close(self):
        self.file.close()


class Exports(Totals):
    """Correct: exports the tokens."""

    def exposition(self, plugins):
        return f"# TYPE tokens_total counter\ntokens_total {self.tokens}\n"


class WithoutContract(Totals, contract=None):
    """States no contract of its own."""


class Averages(Totals):
    def record(self, stats):
        self.seconds = sum(stats.inter_token_latency) / len(stats.inter_token_latency)


class NeedsScheduler(Totals):
    def record(self, stats):
        self.running = stats.scheduler.num_running


class AddsNone(Totals):
    def record(self, stats):
        self.seconds += sum(ended.metrics.queue_seconds for ended in stats.finished)


class AddsSizes(Totals):
    def record(self, stats):
        tiers = stats.scheduler.kv_tiers if stats.scheduler else {}
        self.seconds += sum(tier.used_bytes for tier in tiers.values())


class Rates(Totals):
    def __init__(self, context):
        super().__init__(context)
        self.since = context.clock()

    def report(self):
        now = self.context.clock()
        self.rate, self.since = self.tokens / (now - self.since), now


class Drains(Totals):
    def record(self, stats):
        while stats.finished:
            self.tokens += stats.finished.pop().metrics.num_generation_tokens


class Normalizes(Totals):
    def record(self, stats):
        if stats.scheduler is not None:
            stats.scheduler.kv_cache_usage *= 100


class Keeps(Totals):
    def __init__(self, context):
        super().__init__(context)
        self.all = []

    def record(self, stats):
        self.all.append(stats)


EVERYTHING = []


class KeepsElsewhere(Totals):
    def record(self, stats):
        EVERYTHING.append(stats)


class KeepsIds(Totals):
    def __init__(self, context):
        super().__init__(context)
        self.ids = {}

    def record(self, stats):
        for ended in stats.finished:
            self.ids[ended.request_id] = ended.metrics.num_generation_tokens


class Database(Totals):
    def __init__(self, context):
        super().__init__(context)
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table tokens (n)")

    def record(self, stats):
        self.database.execute("insert into tokens values (?)", [stats.num_generation_tokens])


class ClosesOnce(Totals):
    def close(self):
        self.file.close()
        del self.file


class WritesAfterClose(Totals):
    def record(self, stats):
        self.file.write(msgspec.json.encode(stats.num_generation_tokens).decode())


class LeavesAThread(Totals):
    def __init__(self, context):
        super().__init__(context)
        leave_thread("sink")


class LeavesTheFile(Totals):
    opened = []

    def close(self):
        self.opened.append(self.file)


class CannotClose(Totals):
    def record(self, stats):
        self.first = stats.num_generation_tokens

    def close(self):
        if not self.file.closed:
            self.file.write(str(self.first))
        super().close()


class Sleeps(Totals):
    def record(self, stats):
        spend(0.04)


class SleepsInReports(Totals):
    """Every tenth report waits."""

    count = 0

    def report(self):
        self.count += 1
        if self.count % 10 == 0:
            spend(0.04)


class ExportsNothing(Totals):
    def exposition(self, plugins):
        if self.tokens:
            return f"tokens_total {self.tokens}\n"


class ExportsMeans(Totals):
    count = 0

    def record(self, stats):
        super().record(stats)
        self.count += 1

    def exposition(self, plugins):
        return f"tokens_per_batch {self.tokens / self.count}\n"


class ExportsRawLabels(Totals):
    def exposition(self, plugins):
        return f'tokens_total{{model="{self.context.model}"}} {self.tokens}\n'


class ExportsTwice(Exports):
    def exposition(self, plugins):
        return 2 * super().exposition(plugins)


class ExportsSinceLast(Exports):
    def exposition(self, plugins):
        text, self.tokens = super().exposition(plugins), 0
        return text


class ExportsTotalsOfTheEngine(Totals):
    queried = 0

    def record(self, stats):
        if stats.scheduler is not None:
            self.queried = stats.scheduler.prefix_cache.queried_tokens

    def exposition(self, plugins):
        return f"# TYPE queried_total counter\nqueried_total {self.queried}\n"


class ExportsKnownPlugins(Totals):
    def exposition(self, plugins):
        lines = ["# TYPE plugin_rows_total counter"]
        for number, meter in enumerate(plugins.meters.values()):
            lines.append(f'plugin_rows_total{{number="{number}"}} {meter.rows}')
        return "\n".join(lines) + "\n"


class ExportsAfterClose(Totals):
    def exposition(self, plugins):
        return f"bytes_written {self.file.tell()}\n"
