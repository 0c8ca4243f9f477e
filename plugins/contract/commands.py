"""Commands of the `hardpoint` program, added through the `cli_commands` hook."""

from .config.engine import ConfigSources
from .requests.params import Prompt
from .server.commands import Calibrate as Calibrate
from .server.commands import CheckPlugin as CheckPlugin
from .server.commands import (
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
from .server.commands import InspectModel as InspectModel
from .server.commands import JoinEngine as JoinEngine
from .server.commands import MakeApplication as MakeApplication
from .server.commands import Measure as Measure
from .server.commands import OpenAsync as OpenAsync
from .server.commands import OpenWorkers as OpenWorkers
from .server.commands import ServeOnRay as ServeOnRay
from .server.commands import Simulate as Simulate

__all__ = [
    "Command",
    "CommandContext",
    "ComponentDetails",
    "ComponentInfo",
    "ConfigSources",
    "ContextMemory",
    "Generator",
    "ModelReport",
    "PluginCatalog",
    "Prompt",
    "PromptTrace",
    "WeightGroup",
]
