"""A working directory for the program, with the scripted model."""

from __future__ import annotations

from pathlib import Path

from hardpoint.testing import scripted_config


def write_config(folder: Path, scripted: Path, *settings: str) -> None:
    """Write a `hardpoint.toml` that names the scripted model; `settings` are further lines."""
    config = scripted_config(scripted)
    (enabled,) = config["plugins"]["enable"]
    lines = (
        f'model = "{config["model"]}"',
        'dtype = "float32"',
        'load.use = "dummy"',
        f'attention.use = "{config["attention"]["use"]}"',
        f'plugins.enable = [{{ use = "{enabled["use"]}", name = "{enabled["name"]}" }}]',
        *settings,
    )
    (folder / "hardpoint.toml").write_text("\n".join(lines))
