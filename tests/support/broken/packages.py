"""Packages that `plugins check` has to judge, and the records that it makes of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from support.strangers import Site

SINK = """
{imports}
from hardpoint.plugins import Options, StatSink

class Sink(StatSink):
    contract = 1
    {attributes}

    def record(self, stats):
        {record}
"""


@dataclass(frozen=True)
class Package:
    """A distribution with one plugin.

    Attributes:
        source: source code of its module.
        exit_code: expected of its check.
        problem: part of the result's `problem`.
        outcomes: expected ones by check.
        messages: parts of the evidence or reason by check.
        limits: others than the usual ones.
    """

    name: str
    source: str
    exit_code: int
    problem: str = ""
    outcomes: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    kind: str = "stat_sinks"
    value: str = "Sink"

    def install(self, site: Site) -> None:
        """Install it into a site."""
        point = {self.name.removeprefix("acme_"): f"{self.name}:{self.value}"}
        site.install(self.name, self.source, {self.kind: point})


def sink(imports: str = "", attributes: str = "", record: str = "pass") -> str:
    """Return the source of a stat sink."""
    return SINK.format(imports=imports, attributes=attributes, record=record)


EARLY: Sequence[Package] = (
    Package(
        "acme_no_contract",
        sink().replace("contract = 1", ""),
        exit_code=2,
        problem="it states no contract version; add `contract = 1`",
    ),
    Package("acme_no_import", sink(imports="import acme_absent"), 2, problem="acme_absent"),
    Package(
        "acme_later_contract",
        sink().replace("contract = 1", "contract = 9"),
        exit_code=3,
        problem="it states contract 9 of stat_sinks; this Hardpoint accepts 1",
    ),
    Package(
        "acme_no_option",
        sink(attributes="class Options(Options):\n        url: str"),
        exit_code=2,
        problem="plugin.no_option.url",
    ),
    Package(
        "acme_hangs",
        sink(imports="import threading; threading.Event().wait()"),
        exit_code=2,
        problem="it did not end within 5 s",
        limits={"seconds": 5},
    ),
)
"""Those whose suite does not run."""

EXITS = Package(
    "acme_exits",
    sink(imports="import os", record="os._exit(3)"),
    exit_code=1,
    problem="its process ended with exit code 3",
    outcomes={"test_resources": "failed", "test_speed": "not_proved"},
    messages={"test_resources": "exit code 3", "test_speed": "the run ended before"},
)

EXPECTED = Package(
    "acme_expected",
    sink(attributes='expected_failures = {"test_exposition": "it is not text yet"}')
    + "\n    def exposition(self, plugins):\n        return 5\n",
    exit_code=0,
    outcomes={"test_exposition": "expected_failure", "test_statistics": "proved"},
    messages={"test_exposition": "it is not text yet"},
)

RUN: Sequence[Package] = (
    Package(
        "acme_hungry",
        sink(record="self.kept = bytearray(1 << 40)"),
        exit_code=1,
        outcomes={"test_statistics": "failed", "test_contract": "proved"},
        messages={"test_statistics": "MemoryError"},
    ),
    Package(
        "acme_large_file",
        sink(
            imports="import tempfile",
            record="tempfile.TemporaryFile().write(bytes(1 << 22))",
        ),
        exit_code=1,
        outcomes={"test_statistics": "failed"},
        messages={"test_statistics": "File too large"},
        limits={"file_bytes": 1 << 20},
    ),
    Package(
        "acme_no_text",
        sink() + "\n    def exposition(self, plugins):\n        return 5\n",
        exit_code=1,
        outcomes={"test_exposition": "failed", "test_statistics": "proved"},
        messages={"test_exposition": "5"},
    ),
    EXPECTED,
    Package(
        "acme_no_such_check",
        sink(attributes='expected_failures = {"test_nothing": "a slip of the pen"}'),
        exit_code=1,
        outcomes={"test_nothing": "failed", "test_statistics": "proved"},
        messages={"test_nothing": "StatSinkSuite has no test_nothing"},
    ),
)
"""Others whose suite runs."""

UNUSED = Package(
    "acme_unused",
    """
from hardpoint.plugins import EngineHalf, StepPart

class Half(EngineHalf):
    def uses(self, request):
        return request.tags.get("team") == "nobody's"

class Part(StepPart):
    contract = 1

    def engine_half(self, context):
        return Half()
""",
    exit_code=0,
    outcomes={
        "test_contract": "proved",
        "test_steps": "not_proved",
        "test_memory": "not_proved",
        "test_speed": "not_proved",
    },
    messages=dict.fromkeys(
        ("test_steps", "test_speed"),
        "needs a suite of its author: no request of `requests` uses the part; override requests()",
    ),
    kind="step_parts",
    value="Part",
)
"""A step part that no request of its kind's suite uses."""

IDLE = Package(
    "acme_idle",
    """
from hardpoint.plugins import EngineHalf, StepPart, WorkerHalf

class Part(StepPart):
    contract = 1

    def engine_half(self, context):
        return EngineHalf()

    def worker_half(self, context):
        return WorkerHalf()
""",
    exit_code=1,
    outcomes={"test_contract": "proved", "test_effect": "failed"},
    messages={"test_effect": "no half has a method of its own"},
    kind="step_parts",
    value="Part",
)
"""A step part that does nothing."""

UNSEEN = Package(
    "acme_unseen",
    """
import logging
from hardpoint.plugins import EngineHalf, StepPart

class Half(EngineHalf):
    def updated(self, plan):
        logging.getLogger("acme").debug("step %d", plan.step)

class Part(StepPart):
    contract = 1

    def engine_half(self, context):
        return Half()
""",
    exit_code=0,
    outcomes={"test_contract": "proved", "test_effect": "not_proved", "test_steps": "proved"},
    messages={"test_effect": "undecidable with these requests: none of updated returned anything"},
    kind="step_parts",
    value="Part",
)
"""A step part whose effect is not in the engine."""

NAMED = Package(
    "acme_named",
    """
from hardpoint import plugins
from hardpoint.plugins import Annotated, EngineHalf, Meta, StepPart

class Half(EngineHalf):
    def __init__(self, key):
        self.key = key

    def gate(self, request):
        assert request.source.plugin_args[self.key]["by"] >= 1

    def figures(self, request_id):
        return {"by": 1}

class Part(StepPart):
    contract = 1
    named_only = True

    class Arguments(plugins.Arguments):
        by: Annotated[int, Meta(ge=1)]
        weights: dict[int, float] = {}

    def engine_half(self, context):
        return Half(f"step_parts/{self.name}")
""",
    exit_code=0,
    outcomes={"test_contract": "proved", "test_effect": "proved", "test_steps": "proved"},
    kind="step_parts",
    value="Part",
)
"""A step part that is used by requests with arguments alone, which have no default."""

BIAS = """
from datetime import datetime

from hardpoint import plugins
from hardpoint.plugins import Annotated, LogitsProcessor, Meta, Phase

class Bias(LogitsProcessor):
    contract = 1
    phase = Phase.BIAS

    class Arguments(plugins.Arguments):
        {fields}

    def apply(self, logits, rows):
        for row, arguments in enumerate(rows.arguments()):
            logits[row, 0] += {by}
        return logits
"""

CONSTRAINED = Package(
    "acme_constrained",
    BIAS.format(
        fields="""
        by: Annotated[float, Meta(gt=4)]
        token: Annotated[str, Meta(pattern="^[a-z]+$")]
        step: Annotated[float, Meta(multiple_of=0.5, ge=0, le=2)]
        range: tuple[int, int]
""",
        by="arguments.by",
    ),
    exit_code=0,
    outcomes={"test_contract": "proved", "test_effect": "proved", "test_history": "proved"},
    kind="logits_processors",
    value="Bias",
)
"""A logits processor with arguments that are drawn within their limits."""

UNDRAWN = Package(
    "acme_undrawn",
    BIAS.format(fields="until: datetime", by="arguments.until.year"),
    exit_code=0,
    outcomes={
        "test_contract": "not_proved",
        "test_effect": "not_proved",
        "test_swaps": "not_proved",
    },
    messages={"test_swaps": "no values are drawn for the field 'until', which has no default"},
    kind="logits_processors",
    value="Bias",
)
"""A logits processor with arguments that only its author can draw."""

SUPPLIED = Package(
    "acme_supplied",
    """
from hardpoint.plugins import Annotated, EngineHalf, Meta, Options, StepPart

class Half(EngineHalf):
    def __init__(self, limit):
        self.capacity = {"seats": limit}

    def cost(self, request):
        return {"seats": 1}

class Part(StepPart):
    contract = 1
    conformance_suite = "acme_supplied:TestPart"

    class Options(Options):
        limit: Annotated[int, Meta(ge=1)]

    def engine_half(self, context):
        return Half(self.options.limit)

def __getattr__(name):
    if name != "TestPart":
        raise AttributeError(name)
    from hardpoint.testing import StepPartSuite

    return type("TestPart", (StepPartSuite,), {"part": Part, "options": {"limit": 3}})
""",
    exit_code=0,
    outcomes={"test_contract": "proved", "test_effect": "proved", "test_steps": "proved"},
    kind="step_parts",
    value="Part",
)
"""A step part with an option without a default, which the author's suite gives."""

LACKING = Package(
    "acme_lacking",
    sink(
        attributes="""
    def __init__(self, context):
        super().__init__(context)
        raise ImportError("it needs the library acme: pip install acme")
"""
    ),
    exit_code=0,
    outcomes={"test_statistics": "not_proved"},
    messages={"test_statistics": "this machine lacks a requirement: it needs the library acme"},
)
"""One whose library is not installed, which its message names."""

ACTIVE = Package(
    "acme_active",
    sink(
        imports="import contextlib, importlib, socket, subprocess, sys\nimport numpy",
        attributes="""
    def __init__(self, context):
        super().__init__(context)
        open("acme_written", "w").close()
        importlib.import_module("tqdm.auto")
        __import__("yaml")
        subprocess.run([sys.executable, "-c", ""], check=True)
        with contextlib.suppress(OSError), socket.socket() as client:
            client.connect(("127.0.0.1", 9))
""",
    ),
    exit_code=0,
    outcomes={"test_statistics": "proved"},
)
"""One that is right, and does more than is usual."""
