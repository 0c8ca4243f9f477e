"""The package keeps every rule of the engine for its kinds: the conformance kit checks it."""

from acme_gpt.byte_text import ByteText
from acme_gpt.file_format import TinyGPTFile
from acme_gpt.model import TinyGPT
from tiny import CONFIG, random_weights, write_model

from hardpoint.plugins import ModelConfig
from hardpoint.testing import ModelSuite, TokenizerSuite, WeightLoaderSuite

pytest_plugins = ["hardpoint.testing"]


class TestTinyGPT(ModelSuite):
    model = TinyGPT
    # Two ranks can divide the heads, and three.
    config = ModelConfig(
        architecture="TinyGPT",
        hf=CONFIG | {"hidden_size": 48, "num_heads": 6},
        vocab_size=257,
        max_position_embeddings=64,
    )


class TestByteText(TokenizerSuite):
    tokenizer = ByteText


class TestTinyGPTFile(WeightLoaderSuite):
    loader = TinyGPTFile

    def write(self, folder):
        return write_model(folder / "model.tgpt"), random_weights()
