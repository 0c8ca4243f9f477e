"""What engines that step together cannot do."""

from __future__ import annotations

from hardpoint.plugins import ConfigError, EngineConfig
from hardpoint.plugins.config import ConfigSources


def check_waves(config: EngineConfig, config_sources: ConfigSources) -> None:
    """Refuse settings that cannot work where engines share experts.

    Raises:
        ConfigError: naming the setting.
    """
    parallel, length = config.parallel, config.max_model_len
    refused = (
        # A stage would run a batch of another engine's step, or none.
        ("parallel.pipeline", "1", parallel.pipeline, parallel.pipeline > 1),
        # Steps that are under way at once are not matched with those of the other engines.
        ("scheduler.asynchronous", "false", "true", config.scheduler.asynchronous),
        # Each engine would find another length, by the memory that it has.
        ("max_model_len", "a number, or none", "'auto'", length == "auto"),
    )
    for name, expected, got, is_set in refused:
        if is_set:
            raise ConfigError(
                config_sources.locate(
                    f"{name}: expected {expected}, since the engines share experts "
                    f"(parallel.expert with parallel.data = {parallel.data}), got {got}"
                )
            )
