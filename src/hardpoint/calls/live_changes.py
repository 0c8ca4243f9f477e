"""Live changes in LLM and AsyncLLM: of plugins, of settings, and of the scheduling policy."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.host.live.settings import ChangeRequest, Running
from hardpoint.plugins import SchedulingPolicy
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.config_tables import PluginUse

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

Use = str | type | PluginUse | Mapping[str, str]
"""A component: an entry-point name, an FQCN, a class, or a table with `use` and `name`."""


class SyncLiveChanges:
    """The calls of a program that waits for them."""

    _engine: LLMEngine

    def set_config(self, values: Mapping[str, Any], running: Running = "finish") -> Manifest:
        """Change settings while requests run: in all processes, or in none.

        Args:
            values: by dotted path, `{"scheduler.max_waiting": 100}` for example; the reference of
                the configuration lists which are live, and the others are refused.
            running: as for `set_plugins`.

        Returns:
            The plugins, in a new generation. An engine that is restarted has the new settings.

        Raises:
            ConfigError, PluginError: a value is wrong, or needs a restart; names its path.
            BusyError: another change is under way.
            HardpointError: a process failed, or took longer than `plugins.change_seconds`. Nothing
                has changed.
        """
        return self._engine.change(_config(values, running))

    def set_plugins(
        self,
        *,
        enable: Sequence[Use] = (),
        disable: Sequence[str] = (),
        replace: Mapping[str, Use] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        config: Mapping[str, Any] | None = None,
        running: Running = "finish",
        origin: str = "set_plugins()",
    ) -> Manifest:
        """Change plugins while requests run: in all processes, or in none.

        Args:
            enable: components to enable in addition: names, FQCNs, classes, or tables with `use`
                and `name`.
            disable: names of enabled components.
            replace: the component that takes an enabled one's place and name, by that name.
            options: the options of components, by name, in the place of those before.
            config: settings that change together with them, as for `set_config`.
            running: what requests do that use a logits processor which is replaced or disabled:
                "finish" with it, or "end", with the finish reason "abort".
            origin: who changes them, for logs and `settings`.

        Returns:
            The plugins, in a new generation. An engine that is restarted has them, too.

        Raises:
            ConfigError, PluginError: a component or an option is wrong, or its kind needs a
                restart; names it.
            BusyError, HardpointError: as `set_config`.
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


class AsyncLiveChanges:
    """The calls of a program that runs an event loop."""

    _engine: AsyncEngine

    async def set_config(self, values: Mapping[str, Any], running: Running = "finish") -> Manifest:
        """Do what `LLM.set_config` does."""
        return await self._change(_config(values, running))

    async def set_plugins(
        self,
        *,
        enable: Sequence[Use] = (),
        disable: Sequence[str] = (),
        replace: Mapping[str, Use] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        config: Mapping[str, Any] | None = None,
        running: Running = "finish",
        origin: str = "set_plugins()",
    ) -> Manifest:
        """Do what `LLM.set_plugins` does."""
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
            origin: who replaces it, for logs and `settings`.

        Raises:
            ConfigError, PluginError: the policy cannot be built; the old one stays.
        """
        policy = {"use": use, "options": {} if options is None else options}
        async with self._policies:  # several follow one another
            await self._change(ChangeRequest.of(origin, policy=policy))

    @functools.cached_property
    def _policies(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def _change(self, asked: ChangeRequest) -> Manifest:
        return await self._engine.change(asked)


def _config(values: Mapping[str, Any], running: Running) -> ChangeRequest:
    return ChangeRequest.of("set_config()", config=values, running=running)


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
