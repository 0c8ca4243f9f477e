from acme_gpt.file_format import TinyGPTFile
from acme_gpt.model import TinyGPT
from tiny import CONFIG, random_weights, write_model

from hardpoint.plugins import ModelConfig
from hardpoint.testing import ModelSuite, WeightLoaderSuite

pytest_plugins = ["hardpoint.testing"]


class TestTinyGPT(ModelSuite):
    model = TinyGPT
    config = ModelConfig(
        architecture="TinyGPT", hf=CONFIG, vocab_size=257, max_position_embeddings=64
    )


class TestTinyGPTFile(WeightLoaderSuite):
    loader = TinyGPTFile

    def write(self, folder):
        return write_model(folder / "model.tgpt"), random_weights()
