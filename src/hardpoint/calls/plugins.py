"""The group `plugins` of LLM and AsyncLLM: change, measure and call plugins."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from hardpoint.core.engine.utility_calls import ControlCalls, EngineUtilities
from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.host.boundary.parts.states import joined_states
from hardpoint.host.live.settings import ChangeRequest, Running
from hardpoint.host.registry.kinds import KINDS, Number
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import takes_arguments
from hardpoint.host.system.control_calls import AsyncCaller, SyncCaller
from hardpoint.plugins import SchedulingPolicy
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config_tables import PluginUse
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.requests.stats import Health
from hardpoint.plugins.server import InstalledExtension, ServerContext
from hardpoint.plugins.text.arguments import ComponentWithArguments
from hardpoint.requests import takes_options
from hardpoint.toolkit.reloading import PluginWatcher
from hardpoint.typed import json_schema

from .engines import Change
from .io_processors import IOProcessors, RoundLimits
from .reloading import LoopChanges
from .running import AsyncRequests, SyncRequests

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["AsyncPluginGroup", "PluginGroup"]

Use = str | type | PluginUse | Mapping[str, str]
"""A component: an entry-point name, an FQCN, a class, or a table with `use` and `name`."""

Options = Mapping[str, Mapping[str, Any]]
"""Options of components, by name."""

_CHANGE = "plugins.change()"


class PluginGroup(SyncCaller):
    """The plugins of an LLM: `llm.plugins`."""

    def __init__(self, engine: LLMEngine, requests: SyncRequests) -> None:
        self._engine, self._requests = engine, requests
        self._watcher: PluginWatcher | None = None

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""
        return self._engine.parts.plugins.manifest

    def watch(self, watcher: PluginWatcher) -> None:
        """Replace plugins when a watcher reports that their files were saved."""
        self._watcher = watcher
        watcher.start(
            lambda: self.manifest,
            lambda uses, origin: self.change(replace=dict(uses), origin=origin),
        )

    def end_watch(self) -> None:
        """Stop the watcher, if there is one."""
        if self._watcher is not None:
            self._watcher.close()

    def enable(self, *uses: Use, options: Options | None = None) -> Manifest:
        """Enable components while requests run; see `change`."""
        return self.change(enable=uses, options=options)

    def disable(self, *names: str) -> Manifest:
        """Disable components by name while requests run; see `change`."""
        return self.change(disable=names)

    def change(
        self,
        *,
        enable: Sequence[Use] = (),
        disable: Sequence[str] = (),
        replace: Mapping[str, Use] | None = None,
        options: Options | None = None,
        config: Mapping[str, Any] | None = None,
        running: Running = "finish",
        origin: str = _CHANGE,
    ) -> Manifest:
        """Change plugins while requests run: in all processes, or in none.

        Args:
            enable: components to enable in addition: names, FQCNs, classes, or tables with `use`
                and `name`.
            disable: names of enabled components.
            replace: the component that takes an enabled component's place and name, by that name.
            options: the options of components, by name; they replace the present ones.
            config: settings that change together with them, as for `engines.set_config`.
            running: what requests do that use a logits processor which is replaced or disabled:
                "finish" with it, or "end", with the finish reason "abort".
            origin: who changes them, for logs and `engines.settings`.

        Returns:
            The plugins, in a new generation. An engine that is restarted has them, too.

        Raises:
            ConfigError, PluginError: a component or an option is wrong, or its kind needs a
                restart; names it.
            BusyError, HardpointError: as `engines.set_config`.
        """
        changes = _changes(enable, disable, replace, options)
        return self._engine.change(_asked(changes, config, running, origin))

    def set_policy(
        self, use: str | type[SchedulingPolicy], options: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the scheduling policy; no request is lost.

        Args:
            use: entry-point name, FQCN or class.
            options: options of the policy.

        Raises:
            ConfigError, PluginError: the policy cannot be built; the old one stays.
        """
        self._engine.set_policy(use, options)

    def health(self) -> Health:
        """Return the faults of plugins, their effects, and the quarantined plugins."""
        return self._engine.health()

    meters = ControlCalls.plugin_meters

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of components that have one, by name; see `Component.dump_state`."""
        of_engine = EngineUtilities.plugin_states.call(self._engine.call_utility)
        return joined_states(self._engine.states(), of_engine)

    call_part = ControlCalls.call_part

    @takes_options
    def process(
        self,
        data: Any,
        io_processor: str | None = None,
        *,
        as_json: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Return the output of an IO processor for an input, by requests to the model.

        Args:
            data: the input, which the processor checks; any object that it takes.
            io_processor: its name; None is the only enabled one.
            as_json: return the bytes that it sends over HTTP.
            options: `RequestOptions`, of each request to the model.

        Raises:
            RequestError: the input is wrong, no such processor is enabled, or the engine rejects
                one of its prompts.
            PluginFaultError: the processor failed, or another plugin.
            RequestEndedError: a request to the model ended without a result.
            EnginePausedError, EngineDeadError: as `generate`.
        """
        processor = self._engine.parts.companion(IOProcessors).find(io_processor)
        call = processor.begin(data, _round_limits(self._engine.parts))
        try:
            while (prompts := call.prompts) is not None:
                name = processor.prompts_of(call)
                outputs = self._requests.whole(prompts, call.options(options), name)
                processor.advance(call, outputs, as_json=as_json)
        finally:
            processor.drop(call)
        return call.output

    def _call_utility(self, method: str, *args: Any) -> Any:
        return self._engine.call_utility(method, *args)


class AsyncPluginGroup(AsyncCaller):
    """The plugins of an AsyncLLM: `llm.plugins`."""

    def __init__(self, engine: AsyncEngine, requests: AsyncRequests, change: Change) -> None:
        self._engine, self._requests, self._change = engine, requests, change
        self._policies = asyncio.Lock()
        self._watcher: PluginWatcher | None = None
        self._changes = LoopChanges(lambda: engine.loop, self.change)

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""
        return self._engine.parts.plugins.manifest

    def watch(self, watcher: PluginWatcher) -> None:
        """Replace plugins when a watcher reports that their files were saved."""
        self._watcher = watcher
        watcher.start(lambda: self.manifest, self._changes.replace)

    def end_watch(self) -> None:
        """Stop the watcher, if there is one."""
        self._changes.end()
        if self._watcher is not None:
            self._watcher.close()

    async def enable(self, *uses: Use, options: Options | None = None) -> Manifest:
        """Enable components while requests run; see `change`."""
        return await self.change(enable=uses, options=options)

    async def disable(self, *names: str) -> Manifest:
        """Disable components by name while requests run; see `change`."""
        return await self.change(disable=names)

    async def change(
        self,
        *,
        enable: Sequence[Use] = (),
        disable: Sequence[str] = (),
        replace: Mapping[str, Use] | None = None,
        options: Options | None = None,
        config: Mapping[str, Any] | None = None,
        running: Running = "finish",
        origin: str = _CHANGE,
    ) -> Manifest:
        """Change plugins while requests run, as `LLM.plugins.change` does."""
        changes = _changes(enable, disable, replace, options)
        return await self._change(_asked(changes, config, running, origin))

    async def set_policy(
        self,
        use: str | type[SchedulingPolicy],
        options: Mapping[str, Any] | None = None,
        *,
        origin: str = "set_policy()",
    ) -> None:
        """Replace the scheduling policy; no request is lost.

        Args:
            use: entry-point name, FQCN or class.
            options: options of the policy.
            origin: who replaces it, for logs and `engines.settings`.

        Raises:
            ConfigError, PluginError: the policy cannot be built; the old one stays.
        """
        policy = {"use": use, "options": {} if options is None else options}
        async with self._policies:  # several follow one another
            await self._change(ChangeRequest.of(origin, policy=policy))

    async def health(self) -> Health:
        """Return the faults of plugins, the quarantined plugins, and the number of restarts.

        Raises:
            EngineDeadError: the engine is dead and is not restarted.
        """
        return await self._engine.health()

    meters = ControlCalls.plugin_meters

    async def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of components that have one, as `LLM.plugins.states` does."""
        of_engine = await EngineUtilities.plugin_states.call_async(self._engine.call_utility)
        return joined_states(self._engine.states(), of_engine)

    call_part = ControlCalls.call_part

    @takes_options
    async def process(
        self,
        data: Any,
        io_processor: str | None = None,
        *,
        as_json: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Return the output of an IO processor for an input, by requests to the model.

        The processor is called in a thread of its own. Cancelling the task aborts its requests.

        Args:
            data, io_processor, as_json, options: as for `LLM.plugins.process`.

        Raises:
            As `LLM.plugins.process`.
            OverloadedError, EngineClosedError: as `generate`.
        """
        processor = self._engine.parts.companion(IOProcessors).find(io_processor)
        limits = _round_limits(self._engine.parts)
        call = await processor.run(processor.begin, data, limits)
        try:
            while (prompts := call.prompts) is not None:
                name = processor.prompts_of(call)
                outputs = await self._requests.whole(prompts, call.options(options), name)
                await processor.run(processor.advance, call, outputs, as_json=as_json)
        finally:
            processor.drop_later(call)
        return call.output

    def io_processor_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of the inputs of each enabled IO processor, by name."""
        return self._engine.parts.companion(IOProcessors).schemas()

    def argument_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each enabled plugin's arguments, by the plugin's name."""
        return _argument_schemas(self._engine.parts.plugins)

    def server_extensions(self, server: ServerContext) -> list[InstalledExtension]:
        """Call the hook of the same name; return the extensions that plugins add to a server.

        Raises:
            PluginError: a plugin failed, or returned something else.
        """
        return self._engine.server_extensions(server)

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args)


def _round_limits(parts: EngineParts) -> RoundLimits:
    config = parts.config.plugins
    return RoundLimits(rounds=config.io_rounds, prompts=config.io_prompts, clock=parts.clock)


def _argument_schemas(plugins: PluginSet) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each component's arguments, by its name in `plugin_args`.

    Components that are used only when something names them are left out. Of two that have one
    name, the keys are `kind/name`.
    """
    classes: dict[tuple[str, str], type[ComponentWithArguments]] = {
        (entry.kind, entry.name): plugins.target(entry)
        for kind in KINDS.values()
        if kind.takes_arguments and kind.number is not Number.BY_NAME
        for entry in plugins.entries(kind.name)
    }
    taking = {key: cls for key, cls in classes.items() if takes_arguments(cls)}
    count = Counter(name for _, name in taking)
    return {
        name if count[name] == 1 else f"{kind}/{name}": json_schema(cls.Arguments)
        for (kind, name), cls in taking.items()
    }


def _changes(
    enable: Sequence[Use],
    disable: Sequence[str],
    replace: Mapping[str, Use] | None,
    options: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Any]:
    return {
        "enable": enable,
        "disable": disable,
        "replace": {} if replace is None else replace,
        "options": {} if options is None else options,
    }


def _asked(
    changes: dict[str, Any], config: Mapping[str, Any] | None, running: Running, origin: str
) -> ChangeRequest:
    values = {} if config is None else config
    return ChangeRequest.of(origin, plugins=changes, config=values, running=running)
