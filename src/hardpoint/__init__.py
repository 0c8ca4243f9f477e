"""Hardpoint: a plugin-oriented LLM inference engine.

`LLM` runs a model for a script, `AsyncLLM` for the tasks of an event loop. Plugin authors import
from `hardpoint.plugins`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as typing's; a program is imported without anything else first
if TYPE_CHECKING:
    from typing import Any

    from hardpoint.core.frontend.llm_engine import LLMEngine
    from hardpoint.errors import (
        ConversationEndedError,
        EngineClosedError,
        EngineDeadError,
        EnginePausedError,
        EngineTimeoutError,
        PluginError,
    )
    from hardpoint.plugins import (
        CompletionOutput,
        ConfigError,
        EngineConfig,
        HardpointError,
        Logprob,
        LoRARequest,
        ModelError,
        OverloadedError,
        RequestError,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
    )
    from hardpoint.plugins.params import PoolingParams
    from hardpoint.plugins.requests import PoolingRequestOutput

    from .async_llm import AsyncLLM
    from .conversations.parts import PromptPart
    from .llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "ConversationEndedError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EnginePausedError",
    "EngineTimeoutError",
    "HardpointError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "OverloadedError",
    "PluginError",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptPart",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


class _ModuleFinder:
    """Finds modules that other distributions add, such as `hardpoint.vllm`.

    An installed Hardpoint has them in its own folder; with an editable one, they have folders of
    their own.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        package, _, module = name.rpartition(".")
        if package != __name__:
            return None
        from importlib.machinery import PathFinder  # noqa: PLC0415

        folders = [os.path.join(entry, package) for entry in dict.fromkeys(sys.path)]
        folders = [folder for folder in folders if os.path.isdir(os.path.join(folder, module))]
        return PathFinder.find_spec(name, folders)


class _ContractFinder:
    """Registers the old import paths of `hardpoint.plugins` when that package is imported.

    Imports of the registry would make the import of this package slow, and interruptible.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name != "hardpoint.plugins":
            return None
        from importlib.util import find_spec  # noqa: PLC0415

        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            from hardpoint.old_names import modules  # noqa: PLC0415

            modules.register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _ContractFinder())
sys.meta_path.append(_ModuleFinder())

_PACKAGES = ("errors", "host", "plugins", "typed")
"""Packages that are attributes of this one without an import."""


def __dir__() -> list[str]:
    # Without the names that are imported on use, a completing shell would not show them.
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Importing torch takes a second; who only wants parameters or errors does not pay it.
    if name == "LLM":
        from .llm import LLM  # noqa: PLC0415

        return LLM
    if name == "LLMEngine":
        from hardpoint.core.frontend.llm_engine import LLMEngine  # noqa: PLC0415

        return LLMEngine
    if name == "AsyncLLM":
        from .async_llm import AsyncLLM  # noqa: PLC0415

        return AsyncLLM
    if name == "PromptPart":
        from .conversations.parts import PromptPart  # noqa: PLC0415

        return PromptPart
    if name == "__version__":
        from hardpoint.host.registry.discovery import installed_version  # noqa: PLC0415

        return installed_version()
    if name in __all__:
        from hardpoint import errors, plugins  # noqa: PLC0415
        from hardpoint.plugins import params, requests  # noqa: PLC0415

        modules = (errors, params, requests, plugins)
        return next(vars(module)[name] for module in modules if name in vars(module))
    if name in _PACKAGES:
        from importlib import import_module  # noqa: PLC0415

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
