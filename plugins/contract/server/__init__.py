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
    Generator,
)
from .commands import ComponentDetails as ComponentDetails
from .commands import ComponentInfo as ComponentInfo
from .commands import ContextMemory as ContextMemory
from .commands import ModelReport as ModelReport
from .commands import PluginCatalog as PluginCatalog
from .commands import PromptTrace as PromptTrace
from .commands import WeightGroup as WeightGroup
from .engine_set import (
    EngineSet,
    LoadReport,
)
from .engine_set import EngineStatus as EngineStatus
from .extension import (
    Authenticator,
    Background,
    Call,
    Client,
    InstalledExtension,
    Middleware,
    ResponseStore,
    Route,
    ServerExtension,
    Transform,
)
from .generator import (
    AsyncGenerator,
    ServerContext,
    Worker,
    WorkerPlan,
)
from .generator import OpenConversation as OpenConversation
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
    "EngineSet",
    "Generator",
    "HookContext",
    "InstalledExtension",
    "LoadReport",
    "Middleware",
    "ResponseStore",
    "Route",
    "ServerContext",
    "ServerExtension",
    "StatSink",
    "StatSinkContext",
    "ToolCall",
    "Transform",
    "Worker",
    "WorkerPlan",
    "hookimpl",
]
