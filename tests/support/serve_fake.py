"""`hardpoint serve` with a fake engine, as a program: `serve_fake.py ENGINE [argument...]`.

ENGINE is JSON: fields of FakeEngine. While the file `loading` exists, it loads; while the file
`held` exists, no request gets an output after its first.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path

from hardpoint.builtin_plugins.server.command import COMMAND
from hardpoint.plugins import CommandContext, EngineConfig, HardpointError
from hardpoint.plugins.config import ConfigSources
from hardpoint.standard_streams import discard_unwritten
from support.fake_engine import FakeEngine, configured


@dataclasses.dataclass
class Engine(FakeEngine):
    """Holds outputs while a file exists."""

    held: str = ""

    async def _wait(self, count: int) -> None:
        await super()._wait(count)
        while count and self.held and Path(self.held).exists():
            await asyncio.sleep(0.005)


def main() -> int:
    fields = json.loads(sys.argv[1])
    loading = fields.pop("loading", "")
    server = fields.pop("server", {})

    def open_async(config: EngineConfig, sources: ConfigSources, restart: str) -> FakeEngine:
        print("loading", flush=True)
        while loading and Path(loading).exists():
            time.sleep(0.01)
        return Engine(config=config, **fields)

    context = CommandContext(
        load_config=lambda: (configured(**server), ConfigSources()),
        load_catalog=lambda config, sources: NotImplemented,
        open_model=lambda config, sources: NotImplemented,
        open_async=open_async,
        version="9.9",
    )
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    try:
        return COMMAND.run(parser.parse_args(sys.argv[2:]), context)
    except HardpointError as error:
        context.show_error(str(error))
        return 2


if __name__ == "__main__":
    code = main()
    discard_unwritten()  # as the command line does
    sys.exit(code)
