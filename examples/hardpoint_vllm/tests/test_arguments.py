"""Arguments of vLLM's engine and the flags of its server."""

import pytest

from hardpoint.configuration.names_of_vllm import KEYS
from hardpoint.vllm import EngineArgs
from hardpoint.vllm.arguments import ARGUMENTS
from hardpoint.vllm.configs import CompilationConfig, PoolerConfig
from hardpoint.vllm.serve import read_flags
from hardpoint.vllm.special import translate
from hardpoint.vllm.utils import FlexibleArgumentParser

TRANSLATED = {
    "lengths": ({"max_model_len": "4k", "max_num_seqs": 8},
                {"max_model_len": 4000, "scheduler.max_num_seqs": 8}),
    "a length that fits": ({"max_model_len": -1}, {"max_model_len": "auto"}),
    "types": ({"dtype": "half", "kv_cache_dtype": "fp8_e4m3"},
              {"dtype": "float16", "kv_cache.dtype": "fp8"}),
    "ranks": ({"tensor_parallel_size": 2},
              {"parallel.tensor": 2, "executor.use": "multiproc"}),
    "engines": ({"data_parallel_size": 2}, {"parallel.data": 2, "engine.in_process": False}),
    "adapters": ({"enable_lora": True, "max_loras": 3, "max_lora_rank": 32},
                 {"adapters.max_loras": 3, "adapters.max_lora_rank": 32}),
    "drafts": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3,
                                       "prompt_lookup_max": 4}},
               {"speculation.use": ["ngram"], "speculation.num_draft_tokens": 3,
                "plugin.ngram.longest": 4}),
    "a revision": ({"revision": "v1", "model": "acme/small"}, {"model": "acme/small@v1"}),
    "the main revision": ({"model": "acme/small", "revision": "main"}, {"model": "acme/small"}),
    "names": ({"served_model_name": "small"}, {"server.served_names": ["small"]}),
    "a pooler": ({"pooler_config": PoolerConfig(pooling_type="MEAN")},
                 {"plugins.enable": ["mean"]}),
    "head": ({"speculative_config": {"method": "eagle3", "model": "head"}},
             {"speculation.use": ["eagle3"], "plugin.eagle3.model": "head"}),
    "a KV connector": ({"kv_transfer_config": {
                            "kv_connector": "Files", "kv_connector_module_path": "acme.files",
                            "kv_role": "kv_producer",
                            "kv_connector_extra_config": {"folder": "kept"}}},
                       {"kv_connector.use": "acme.files:Files",
                        "plugin.files.kv_role": "kv_producer",
                        "plugin.files.extra_config": {"folder": "kept"},
                        "plugins.enable": [{"use": "hardpoint_vllm:VLLM", "name": "vllm"}]}),
    "quantizations": ({"quantization": "auto_awq"}, {"quantization.use": "awq"}),
    "no white space": ({"guided_decoding_disable_any_whitespace": True},
                       {"plugin.llguidance.max_whitespace": 0,
                        "plugin.llguidance.max_newlines": 0}),
    "defaults": ({"pipeline_parallel_size": 1, "load_format": "auto", "swap_space": 0,
                  "cpu_offload_gb": 0, "hf_overrides": {}, "quantization": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), TRANSLATED.values(), ids=TRANSLATED)
def test_arguments_become_keys(arguments, expected):
    assert translate(arguments).values == expected


def test_what_changes_no_result_is_noted():
    arguments = {
        "compilation_config": CompilationConfig(mode=3),
        "swap_space": 4,
        "kernel_config": {},
    }
    assert [note.partition("=")[0] for note in translate(arguments).notes] == [
        "compilation_config",
        "swap_space",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_transfer_config": {"kv_connector": "x"}}, "kv_connector: .* kv_connector.use"),
        ({"gpu_memory_utilisation": 0.5}, "did you mean gpu_memory_utilization?"),
        ({"port": 80}, "port: there is no such argument"),
        ({"dtype": "int3"}, "dtype: expected one of auto, .* got 'int3'"),
        ({"speculative_config": {"method": "medusa"}}, "expected the method ngram, .* 'medusa'"),
        ({"model": "/tmp", "revision": "v1"}, "revision: expected none for the model '/tmp'"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "pooling_type: expected one of all, .*'MAX'"),
    ],
)
def test_what_has_no_counterpart_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        translate(arguments)


def test_a_parser_has_an_option_for_each_argument():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = parser.parse_args(
        ["--max_model_len", "2k", "--no-enable-prefix-caching", "--compilation-config.mode", "3"]
    )
    args = EngineArgs.from_cli_args(options)
    assert args.max_model_len == "2k"
    assert args.translated(log=False).values == {
        "max_model_len": 2000,
        "kv_cache.prefix_caching": False,
    }
    assert vars(options)["seed"] is None
    args.max_num_seqs = 4
    assert args.translated(log=False).values["scheduler.max_num_seqs"] == 4


def test_flags_of_the_server_become_a_configuration():
    flags = read_flags(
        "vllm serve acme/model -tp 2 --served-model-name a b --lora-modules x=/x "
        "--tool-call-parser llama3_json --enable-auto-tool-choice --api-key secret "
        "--max-logprobs 40 --disable-uvicorn-access-log --chat-template ./chat.jinja"
    )
    assert flags.api_key == "secret"
    assert "secret" not in flags.toml
    for line in (
        'model = "acme/model"',
        'served_names = ["a", "b"]',
        'paths = { "x" = "/x" }',
        'parser = "llama3_json"',
        'host = "0.0.0.0"',
        "logprobs = 40",
        'access_log = "off"',
        'chat_template = "./chat.jinja"',
    ):
        assert line in flags.toml


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("acme/model --no-such-flag 1", "--from-vllm: --no-such-flag: there is no such flag"),
        ("acme/model --middleware a.b", "middleware: .* server_extensions"),
        ("--enable-scale-out acme/model", "enable_scale_out: .* use parallel.data"),
        ("acme/model --generation-config vllm", "generation_config: .* generation_config.json"),
        ("m --override-generation-config.top_k 5", "override_generation_config: .*'top_k': 5"),
        ("acme/model --enable-force-include-usage", "requests give stream_options.include_usage"),
        ("acme/model --response-role bot", "response_role: expected assistant, .* got 'bot'"),
    ],
)
def test_flags_without_a_counterpart_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        read_flags(flags)


def test_switches_take_no_value_and_have_opposites():
    names = "prefix-caching", "chunked-prefill"
    for flags in (
        [f"--no-enable-{name}" for name in names],
        [f"--disable-{name}" for name in names],
    ):
        toml = read_flags(f"--monokernel {' '.join(flags)} acme/model").toml
        assert 'model = "acme/model"' in toml
        assert "prefix_caching = false" in toml
        assert "chunked_prefill = false" in toml
    hybrid = "window_groups = true"
    assert hybrid in read_flags("acme/model --enable-hybrid-kv-cache-manager").toml


def test_options_have_the_further_names_of_vllm():
    flags = read_flags(
        "acme/model -asc 2 -ep -tp 2 --device-memory-utilization 0.5 "
        "--allowed-media-domains a.org b.org"
    )
    for line in ("workers = 2", "expert = true", "tensor = 2", 'hosts = ["a.org", "b.org"]'):
        assert line in flags.toml


@pytest.mark.parametrize("name", ["num_speculative_tokens", "num-speculative-tokens"])
def test_dotted_options_have_the_names_of_tables(name):
    flags = read_flags(
        f"acme/model --speculative_config.method ngram --speculative-config.{name} 3"
    )
    assert "num_draft_tokens = 3" in flags.toml


def test_a_file_of_arguments_is_read(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 9001\nserved-model-name: [a, b]\nenforce-eager: true\n")
    flags = read_flags(f"acme/model --config {path}")
    assert "port = 9001" in flags.toml
    assert "enforce_eager = true" in flags.toml


def test_hardpoints_own_errors_advise_the_same_keys():
    names = {n: a for n, a in ARGUMENTS.items() if a.effect == "key" and n in KEYS}
    assert len(names) > 30
    assert {n: a.target for n, a in names.items()} == {n: KEYS[n] for n in names}
