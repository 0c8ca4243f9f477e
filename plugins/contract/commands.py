"""Commands of the `hardpoint` program, added through the `cli_commands` hook."""

from .config.engine import ConfigSources
from .requests.params import Prompt as Prompt
from .server.commands import Calibrate as Calibrate
from .server.commands import CheckPlugin as CheckPlugin
from .server.commands import (
    Command,
    CommandContext,
)
from .server.commands import ComponentDetails as ComponentDetails
from .server.commands import ComponentInfo as ComponentInfo
from .server.commands import ContextMemory as ContextMemory
from .server.commands import Generator as Generator
from .server.commands import InspectModel as InspectModel
from .server.commands import JoinEngine as JoinEngine
from .server.commands import MakeApplication as MakeApplication
from .server.commands import Measure as Measure
from .server.commands import ModelReport as ModelReport
from .server.commands import OpenAsync as OpenAsync
from .server.commands import OpenWorkers as OpenWorkers
from .server.commands import PluginCatalog as PluginCatalog
from .server.commands import PromptTrace as PromptTrace
from .server.commands import ServeOnRay as ServeOnRay
from .server.commands import Simulate as Simulate
from .server.commands import WeightGroup as WeightGroup

__all__ = ["Command", "CommandContext", "ConfigSources"]
