"""The child of a check: `python -m hardpoint.testing.checking FD < request`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from hardpoint.configuration.loading import config_from
from hardpoint.errors import HardpointError, PluginContractError
from hardpoint.host.registry.adapt import Adapter, ComponentAdapters, load_component
from hardpoint.host.registry.adapters.contract_1 import warn_of_earlier
from hardpoint.host.registry.discovery import discover, installed_version
from hardpoint.host.registry.kinds import KINDS, PluginKind
from hardpoint.host.registry.plugin_options import checked_options
from hardpoint.host.registry.selection import Selection
from hardpoint.plugins.commands import ComponentInfo
from hardpoint.plugins.component import Source
from hardpoint.plugins.config import ConfigSources, EngineConfig
from hardpoint.process.child_processes.parent_death import end_with_parent

from .activity import ActivityWatch
from .request import CANNOT_LOAD, OTHER_CONTRACT, CheckRequest, check_record

Send = Callable[[Mapping[str, Any]], None]


class OtherContractError(PluginContractError):
    """A component states another version of the contract than is asked for."""


def main() -> None:
    """Check one component; send records as lines of JSON to the descriptor of the argument."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckRequest)
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def send(record: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(record) + "\n")
        pipe.flush()

    end_with_parent()
    request.limits.apply()
    sys.path[:] = request.sys_path
    try:
        _check(request, send)
    except OtherContractError as error:
        send({"record": "refused", "exit_code": OTHER_CONTRACT, "problem": str(error)})
    except HardpointError as error:
        send({"record": "refused", "exit_code": CANNOT_LOAD, "problem": str(error)})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of the plugin may hang


def _check(request: CheckRequest, send: Send) -> None:
    """Load the component, run its suite, and report all that is to be known.

    Raises:
        HardpointError: it cannot be loaded.
    """
    watch = ActivityWatch([_package(request.value)], request.folder)
    watch.start()
    config = _config(request)
    kind, source, target = _load(request, config)

    from .enabling import describe_cost, describe_enabling  # noqa: PLC0415 - after the plugin, to see
    from .made_suite import make_suite, options_of, suite_of  # noqa: PLC0415 - what it imports itself

    configured = request.options or _configured_options(request, config, kind)
    suite_options = options_of(suite_of(kind, target))
    options = {**suite_options, **request.options} if suite_options else configured
    checked_options(target, options, f"plugin.{source.name}")
    suite = make_suite(kind, target, source.name, options)
    send(
        {
            "record": "plugin",
            "component": f"{kind.name}/{source.name}",
            "class": source.value,
            "package": source.package,
            "contract": target.contract,
            "accepted_contracts": _accepted(kind),
            "changes_live": kind.can_change(target),
            "deprecated": "".join(warn_of_earlier([(kind, source, target)])),
            "suite": kind.suite,
            "hardpoint": installed_version(),
        }
    )
    _run_suite(request, target, suite, send)
    info = ComponentInfo(
        kind=kind.name,
        name=source.name,
        value=source.value,
        distribution=source.distribution,
        version=source.version,
        package=source.package,
        enabled=False,
        reason="",
    )
    sources = ConfigSources(request.config_sources)
    changes = options if suite_options else request.options
    record, changed = describe_enabling(kind, info, config, sources, changes)
    send({"record": "begin", "check": "scripted run"})
    cost = describe_cost(kind, source.name, suite, config, changed)
    send(record)
    send(cost)
    send({"record": "activity", **watch.report()})
    send({"record": "end"})


def _package(value: str) -> str:
    module = value.partition(":")[0]
    if not module.startswith("hardpoint."):
        return module.partition(".")[0]
    return ".".join(module.split(".")[:3])  # hardpoint.builtin_plugins.X


def _load(request: CheckRequest, config: EngineConfig) -> tuple[PluginKind, Source, Any]:
    """Return the component's kind, its identity, and the component, checked.

    Raises:
        OtherContractError: it states another version of the contract.
        PluginError: it cannot be imported, or does not keep its kind's contract.
    """
    source = Source(
        request.name, request.value, request.distribution, request.version, "plugins check"
    )

    def load_adapters() -> list[Adapter]:
        selection = Selection(config, ConfigSources(request.config_sources), discover())
        selection.enabled()
        return selection.enabled_adapters()

    adapters = ComponentAdapters(load_adapters)
    target = adapters.import_object(source)
    kind = KINDS[request.kind] if request.kind else adapters.kinds_of(target, source)[0]
    stated = getattr(target, "contract", None)
    if type(stated) is int and stated not in _accepted(kind):
        raise OtherContractError(
            f"{source}: it states contract {stated} of {kind.name}; this Hardpoint accepts "
            f"{' and '.join(map(str, _accepted(kind)))}"
        )
    if request.against is not None and stated != request.against:
        raise OtherContractError(
            f"{source}: it states contract {stated} of {kind.name}, not {request.against}"
        )
    return kind, source, load_component(kind, source, target, adapters)


def _accepted(kind: PluginKind) -> list[int]:
    return [version for version in (kind.contract - 1, kind.contract) if version > 0]


def _config(request: CheckRequest) -> EngineConfig:
    return config_from(request.config, caller="plugins check")[0]


def _configured_options(
    request: CheckRequest, config: EngineConfig, kind: PluginKind
) -> Mapping[str, Any]:
    tables = config.plugin
    settings: Mapping[str, Any] = tables.get(f"{kind.name}/{request.name}") or tables.get(
        request.name, {}
    )
    return settings


def _run_suite(request: CheckRequest, target: Any, suite: type, send: Send) -> None:
    """Run the tests of a suite; send a record of each."""
    import pytest  # noqa: PLC0415 - after the plugin

    from .made_suite import MODULE  # noqa: PLC0415
    from .records import CheckRecorder  # noqa: PLC0415

    module = ModuleType(MODULE)
    vars(module)[suite.__name__] = suite
    sys.modules[MODULE] = module
    file = Path(request.folder) / "test_plugin.py"
    file.write_text(f"from {MODULE} import {suite.__name__}\n")
    ini = Path(request.folder) / "pytest.ini"
    ini.write_text("[pytest]\n")
    expected = dict(getattr(target, "expected_failures", {}))
    known = {name for name in dir(suite) if name.startswith("test_")}
    has_own_suite = getattr(target, "conformance_suite", None) is not None
    recorder = CheckRecorder(send, expected, request.reference, has_own_suite=has_own_suite)
    options = ["-c", str(ini), "--rootdir", request.folder, "--basetemp", f"{request.folder}/t"]
    quiet = ["-q", "-p", "no:cacheprovider", "--no-header", "--no-summary"]
    pytest.main([str(file), *options, *quiet], plugins=[recorder])
    for name in expected.keys() - known:
        send(
            check_record(
                name,
                "expected_failures names checks of the suite",
                "failed",
                evidence=f"{suite.__mro__[1].__name__} has no {name}; it has "
                f"{', '.join(sorted(known))}",
            )
        )


if __name__ == "__main__":
    main()
