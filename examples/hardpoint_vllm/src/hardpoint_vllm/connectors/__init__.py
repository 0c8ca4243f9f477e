"""vLLM's KV connectors V1 as KV connectors of Hardpoint."""

from .bases import MODULES as MODULES
from .component import adapt_connector as adapt_connector
from .component import is_connector as is_connector
