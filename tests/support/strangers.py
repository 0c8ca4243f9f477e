"""Third-party distributions, and a program that reports how the engine uses them."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

STRANGER = '''
from hardpoint.plugins import Command, LogitsProcessor, Options, Arguments, Phase, hookimpl

contract = 1

def configure(parser):
    parser.add_argument("--loud", action="store_true")

def run(options, context):
    config, _ = context.load_config()
    print(f"hello from {config.model} {options.loud} {context.version}")
    return 3

@hookimpl
def cli_commands():
    return [Command("hello", "Say hello.", configure, run)]

class Dry(LogitsProcessor):
    """Punish repetition.

    More about it.
    """

    contract = 1
    phase = Phase.PENALTY

    class Options(Options):
        """Options.

        Attributes:
            weight: how much.
        """

        weight: float = 1.0

    class Arguments(Arguments):
        base: int

    def apply(self, logits, rows):
        return logits

@hookimpl
def engine_closing():
    pass
'''

# A program: what comes of the configuration that its argument is, as JSON.
RESOLVE = """
import json, sys
from hardpoint.plugins import EngineConfig, HardpointError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.typed import convert

config = convert(json.loads(sys.argv[1]), EngineConfig, path="")
try:
    plugins = resolve_plugins(config)
except HardpointError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
else:
    policy = plugins.one("scheduling_policies")
    print(json.dumps({
        "on": {f"{e.kind}/{e.name}": [e.value, e.distribution, e.version, e.options, e.origin]
               for e in plugins.manifest.entries},
        "policy": [policy.name, policy.value, policy.distribution, policy.version, policy.options],
        "order": [entry.name for entry, _ in plugins.logits_processors()],
        "not_enabled": [found.label for found in plugins.not_enabled()],
        "imported": [name for name in sys.modules if name.startswith("acme_")],
        "hooks": plugins.hooks().has("request_finished"),
    }))
"""


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, source: str, points: Mapping[str, Mapping[str, str]]) -> None:
        """Install the module `name` as version 2.0 of a distribution, as pip would.

        `points` maps kinds to entry points.
        """
        (self.folder / f"{name}.py").write_text(source)
        info = self.folder / f"{name}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        lines = []
        for kind, entries in points.items():
            lines.append(f"[hardpoint.{kind}]")
            lines += [f"{point} = {value}" for point, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))

    def install_stranger(self) -> None:
        """Install STRANGER: hooks, a logits processor and kinds that do not exist."""
        points = {
            "hooks": {"greeter": "stranger"},
            "logits_processors": {"dry": "stranger:Dry"},
            "novelties": {"new": "stranger:New"},
        }
        self.install("stranger", STRANGER, points)


@contextlib.contextmanager
def open_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Make a site that Python imports from; its modules are forgotten at the end."""
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    for module in folder.glob("*.py"):
        sys.modules.pop(module.stem, None)
