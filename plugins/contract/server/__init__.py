"""Interfaces of servers: routes, commands, hooks, adapter resolvers and stat sinks."""

from hardpoint.plugins.requests.outputs import ToolCall
from hardpoint.plugins.scheduling.step_record import LiveRequest as LiveRequest

from .adapter_resolver import (
    AdapterResolver,
    AdapterResolverContext,
)
from .commands import (
    Command,
    CommandContext,
)
from .commands import ComponentDetails as ComponentDetails
from .commands import ComponentInfo as ComponentInfo
from .commands import ContextMemory as ContextMemory
from .commands import Generator as Generator
from .commands import ModelReport as ModelReport
from .commands import PluginCatalog as PluginCatalog
from .commands import PromptTrace as PromptTrace
from .commands import WeightGroup as WeightGroup
from .engine_set import EngineSet as EngineSet
from .engine_set import EngineStatus as EngineStatus
from .engine_set import LoadReport
from .extension import (
    Authenticator,
    Background,
    Call,
    Client,
    InstalledExtension,
    Middleware,
    ResponseStore,
    Route,
    Transform,
)
from .extension import ServerExtension as ServerExtension
from .generator import (
    AsyncGenerator,
    ServerContext,
    WorkerPlan,
)
from .generator import OpenConversation as OpenConversation
from .generator import Worker as Worker
from .generator import WorkerGroup as WorkerGroup
from .groups import PauseModeName as PauseModeName
from .hooks import (
    HookContext,
    hookimpl,
)
from .journals import JournalReport as JournalReport
from .journals import JournalUse as JournalUse
from .settings import LiveSettings as LiveSettings
from .settings import Setting as Setting
from .stat_sink import (
    StatSink,
    StatSinkContext,
)

__all__ = [
    "AdapterResolver",
    "AdapterResolverContext",
    "AsyncGenerator",
    "Authenticator",
    "Background",
    "Call",
    "Client",
    "Command",
    "CommandContext",
    "HookContext",
    "InstalledExtension",
    "LoadReport",
    "Middleware",
    "ResponseStore",
    "Route",
    "ServerContext",
    "StatSink",
    "StatSinkContext",
    "ToolCall",
    "Transform",
    "WorkerPlan",
    "hookimpl",
]
