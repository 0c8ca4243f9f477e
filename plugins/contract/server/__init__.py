"""Interfaces of servers: routes, commands, hooks, adapter resolvers and stat sinks."""

from hardpoint.plugins.requests.outputs import ToolCall
from hardpoint.plugins.scheduling.step_record import LiveRequest

from .adapter_resolver import (
    AdapterResolver,
    AdapterResolverContext,
)
from .commands import (
    Command,
    CommandContext,
    ComponentDetails,
    ComponentInfo,
    ContextMemory,
    Generator,
    ModelReport,
    PluginCatalog,
    PromptTrace,
    WeightGroup,
)
from .engine_set import (
    EngineSet,
    EngineStatus,
    LoadReport,
)
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
    OpenConversation,
    ServerContext,
)
from .groups import PauseModeName as PauseModeName
from .hooks import (
    HookContext,
    hookimpl,
)
from .journals import (
    JournalReport,
    JournalUse,
)
from .settings import (
    LiveSettings,
    Setting,
)
from .stat_sink import (
    StatSink,
    StatSinkContext,
)
from .workers import (
    Worker,
    WorkerGroup,
    WorkerPlan,
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
    "ComponentDetails",
    "ComponentInfo",
    "ContextMemory",
    "EngineSet",
    "EngineStatus",
    "Generator",
    "HookContext",
    "InstalledExtension",
    "JournalReport",
    "JournalUse",
    "LiveRequest",
    "LiveSettings",
    "LoadReport",
    "Middleware",
    "ModelReport",
    "OpenConversation",
    "PluginCatalog",
    "PromptTrace",
    "ResponseStore",
    "Route",
    "ServerContext",
    "ServerExtension",
    "Setting",
    "StatSink",
    "StatSinkContext",
    "ToolCall",
    "Transform",
    "WeightGroup",
    "Worker",
    "WorkerGroup",
    "WorkerPlan",
    "hookimpl",
]
