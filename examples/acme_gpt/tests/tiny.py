"""A file with random weights."""

import torch
from acme_gpt.file_format import write
from acme_gpt.model import TinyGPT

from hardpoint.plugins import ModelConfig, ModelContext
from hardpoint.testing import load_ops

CONFIG = {
    "architectures": ["TinyGPT"],
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "num_layers": 2,
}


def build():
    """Return a model without weights."""
    config = ModelConfig(
        architecture="TinyGPT", hf=CONFIG, vocab_size=257, max_position_embeddings=64
    )
    place = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    place["ops"] = load_ops(torch.float32)
    return TinyGPT(ModelContext(name="TinyGPT", options=None, config=config, **place))


def random_weights():
    """Return tensors by name, the same each time."""
    source = torch.Generator().manual_seed(5)
    shapes = build().weight_shapes()
    return {name: torch.randn(shape, generator=source) * 0.2 for name, shape in shapes.items()}


def write_model(path):
    """Write a model with random weights; return its path."""
    write(path, CONFIG, random_weights())
    return path
