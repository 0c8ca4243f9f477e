"""The configuration: who wins, who is named, and what a wrong value is told."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.configuration.loading import config_from, default_config_type, load_config
from hardpoint.plugins import ConfigError, EngineConfig
from hardpoint.plugins.config_tables import PluginUse, SchedulerConfig

LoadedConfig = default_config_type()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(settings=(), *, environ=None, path=None, model=None):
    return load_config(path, settings=settings, environ=environ or {}, model=model)


def refused(*settings, environ=None, path=None):
    with pytest.raises(ConfigError) as caught:
        load(settings, environ=environ, path=path)
    return str(caught.value)


def test_nothing_given_is_the_defaults():
    config, config_sources = load()
    assert config == LoadedConfig()
    assert config_sources.of("scheduler.policy") == "default"


def test_later_places_win_and_each_value_knows_its_place(folder):
    (folder / "hardpoint.toml").write_text(
        'model = "file"\nseed = 1\n[scheduler]\nmax_num_seqs = 2\npolicy = "priority"\n'
    )
    config, config_sources = load(
        ["scheduler.max_num_seqs=5"],
        environ={"HARDPOINT__SCHEDULER__MAX_NUM_SEQS": "4", "HARDPOINT__SEED": "3"},
        model="argument",
    )
    assert config.model == "argument"
    assert config.seed == 3
    assert config.scheduler == SchedulerConfig(max_num_seqs=5, policy="priority")
    assert config_sources.of("model") == "argument --model"
    assert config_sources.of("seed") == "environment HARDPOINT__SEED"
    assert config_sources.of("scheduler.max_num_seqs") == "argument --set scheduler.max_num_seqs"
    assert config_sources.of("scheduler.policy") == "file hardpoint.toml"
    assert config_sources.of("scheduler.max_num_batched_tokens") == "default"


def test_counts_have_units_in_arguments_and_variables():
    config, _ = load(
        ["scheduler.max_num_seqs=1e3", "max_model_len=4k", "model=4k"],
        environ={"HARDPOINT__SCHEDULER__MAX_NUM_BATCHED_TOKENS": "8K"},
    )
    assert config.scheduler.max_num_seqs == 1000
    assert config.scheduler.max_num_batched_tokens == 8192
    assert (config.max_model_len, config.model) == (4000, "4k")
    assert load(["kv_cache.memory_fraction=5e-1"])[0].kv_cache.memory_fraction == 0.5
    assert "expected a whole number from 1 to 65536, got 1.5" in refused(
        "scheduler.max_num_seqs=1.5"
    )


def test_an_explicit_file_is_read_instead_of_the_default_one(folder):
    (folder / "hardpoint.toml").write_text("seed = 1")
    (folder / "other.toml").write_text('dtype = "float32"')
    config, config_sources = load(path="other.toml")
    assert (config.seed, config.dtype) == (None, "float32")
    assert config_sources.of("dtype") == "file other.toml"


def test_tables_are_merged_and_lists_replaced(folder):
    (folder / "hardpoint.toml").write_text(
        '[plugins]\nenable = ["a", { use = "p:B", name = "b" }]\n'
        '[plugins.replace]\nx = "p:X"\n[plugin.fair]\ntag = "t"\n'
    )
    config, _ = load()
    assert config.plugins.enable == ["a", PluginUse(use="p:B", name="b")]
    config, config_sources = load(
        ['plugins.enable=["c"]', "plugins.replace.y=p:Y", "plugin.fair={ weight = 2 }"]
    )
    assert config.plugins.enable == ["c"]
    assert config.plugins.replace == {"x": "p:X", "y": "p:Y"}
    assert config.plugin == {"fair": {"tag": "t", "weight": 2}}
    assert config_sources.of("plugins.replace.x") == "file hardpoint.toml"
    assert config_sources.of("plugins.enable[0]") == "argument --set plugins.enable"
    assert config_sources.of("plugin.fair.tag") == "file hardpoint.toml"


def test_whoever_set_an_option_last_answers_for_the_table_of_the_plugin():
    _, config_sources = load(environ={"HARDPOINT__PLUGIN__FAIR__TAG": "x"})
    assert config_sources.of("plugin.fair") == "environment HARDPOINT__PLUGIN__FAIR__TAG"
    assert config_sources.of("plugin.fair.missing") == "environment HARDPOINT__PLUGIN__FAIR__TAG"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("HARDPOINT__SCHEDULER__POLICY", "scheduler.policy"),
        ("HARDPOINT__Scheduler__policy", "scheduler.policy"),
        ("HARDPOINT__PLUGINS__REPLACE__MIN_P", "plugins.replace.min_p"),
        ("HARDPOINT__PLUGINS__REPLACE__LlamaForCausalLM", "plugins.replace.LlamaForCausalLM"),
        ("HARDPOINT__PLUGIN__FAIR__TAG", "plugin.fair.tag"),
        ("HARDPOINT__PLUGIN__LlamaForCausalLM__TAG", "plugin.LlamaForCausalLM.tag"),
    ],
)
def test_names_of_variables(name, path):
    _, config_sources = load(environ={name: "value"})
    assert config_sources.by_path[path] == f"environment {name}"


def test_other_variables_are_left_alone():
    assert (
        load(environ={"HARDPOINT_MODEL": "x", "HARDPOINT": "y", "PATH": "z"})[0] == LoadedConfig()
    )


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("123", "123"),
        ("true", "true"),
        ("1e5", "1e5"),
        ("[1]", "[1]"),
        ('"12"', "12"),
        ("a b", "a b"),
    ],
)
def test_a_field_that_wants_text_gets_the_text(text, model):
    assert load([f"model={text}"])[0].model == model
    assert load(environ={"HARDPOINT__MODEL": text})[0].model == model
    assert load([f"tokenizer.path={text}"])[0].tokenizer.path == model


def test_the_model_argument_is_never_parsed():
    assert load(model='"quoted"')[0].model == '"quoted"'


def test_a_value_may_contain_equals_signs_and_line_breaks():
    assert load(["model=a=b"])[0].model == "a=b"
    assert load(["model=1\nseed = 5"])[0] == LoadedConfig(model="1\nseed = 5")


def test_a_number_or_a_word():
    assert load(["max_model_len=4096"])[0].max_model_len == 4096
    assert load(["max_model_len=auto"])[0].max_model_len == "auto"


@given(st.text(min_size=1))
def test_no_text_can_break_out_of_a_value(text):
    config, _ = load_config(settings=[f"plugin.x.value={text}"], environ={})
    assert config.plugin["x"].keys() == {"value"}
    assert config.scheduler == SchedulerConfig()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "scheduler.max_num_seqs=x",
            "scheduler.max_num_seqs: expected a whole number from 1 to 65536, got 'x'",
        ),
        ("scheduler.max_num_seqs=0", "scheduler.max_num_seqs: expected a whole number >= 1, got 0"),
        (
            "max_model_len=1.5",
            'max_model_len: expected a whole number >= 1 or "auto", or none, got 1.5',
        ),
        (
            "max_model_len=most",
            "max_model_len: expected a whole number >= 1 or \"auto\", or none, got 'most'",
        ),
        (
            "dtype=int3",
            'dtype: expected "auto" or "bfloat16" or "float16" or "float32", got \'int3\'',
        ),
        ("scheduler=5", "scheduler: expected a table, got 5"),
        ("plugins.enable=mirostat", "plugins.enable: expected a list, got 'mirostat'"),
        ("plugins.enable=[5]", "plugins.enable[0]: expected a string or a table, got 5"),
        ("plugins.replace={ a = 'p:A', b = 5 }", "plugins.replace.b: expected a string, got 5"),
        ("plugin.fair=5", "plugin.fair: expected a table, got 5"),
        ("seed=nan", "seed: expected a finite number, got nan"),
    ],
)
def test_a_wrong_value_is_told_path_expectation_value_and_origin(setting, message):
    path = setting.partition("=")[0]
    assert refused(setting) == f"{message} (from argument --set {path})"


def test_the_variable_is_named():
    assert refused(environ={"HARDPOINT__SCHEDULER__MAX_NUM_SEQS": "x"}).endswith(
        "got 'x' (from environment HARDPOINT__SCHEDULER__MAX_NUM_SEQS)"
    )


def test_fields_that_do_not_fit_together_name_the_places_of_both(folder):
    (folder / "hardpoint.toml").write_text("[adapters]\nmax_loras = 4\n")
    message = refused(environ={"HARDPOINT__ADAPTERS__MAX_CPU_LORAS": "2"})
    assert message.startswith("adapters: max_cpu_loras has to be at least max_loras, got {")
    assert message.endswith(
        "(from file hardpoint.toml and environment HARDPOINT__ADAPTERS__MAX_CPU_LORAS)"
    )
    (folder / "hardpoint.toml").write_text("")
    assert refused("kv_connector.use=stores").startswith(
        "kv_connector: the connector 'stores' needs stores to drive: stores = [\"memory\"]"
    )


def test_unknown_keys_are_refused_with_a_suggestion(folder):
    (folder / "hardpoint.toml").write_text("[shceduler]\npolicy = 'fair'\n")
    assert refused().startswith(
        "shceduler: unknown field (did you mean 'scheduler'?); known here: "
    )
    assert refused().endswith("(from file hardpoint.toml)")


def test_unknown_keys_inside_tables_and_lists():
    assert "scheduler.plicy: unknown field (did you mean 'policy'?)" in refused("scheduler.plicy=x")
    message = refused("plugins.enable=[{ usee = 'x' }]")
    assert "plugins.enable[0].usee: unknown field (did you mean 'use'?)" in message


def test_a_path_through_a_value_names_both_origins(folder):
    (folder / "hardpoint.toml").write_text('model = "a"')
    assert refused("model.x=1") == (
        "model.x: cannot be set, for model is no table but 'a', from file hardpoint.toml "
        "(from argument --set model.x)"
    )


@pytest.mark.parametrize("setting", ["scheduler", "=3", "a..b=3", ".=1"])
def test_settings_of_a_wrong_form(setting):
    assert refused(setting) == (
        f"--set: expected PATH=VALUE such as scheduler.policy=fair, got {setting!r}"
    )


def test_variables_of_a_wrong_form():
    assert "HARDPOINT__A____B: expected a path such as HARDPOINT__SCHEDULER__POLICY" in refused(
        environ={"HARDPOINT__A____B": "1"}
    )
    assert "model: set twice, by HARDPOINT__MODEL and HARDPOINT__Model" in refused(
        environ={"HARDPOINT__MODEL": "1", "HARDPOINT__Model": "2"}
    )


def test_files_that_cannot_be_read(folder):
    assert refused(path="no.toml") == "config: there is no file 'no.toml'"
    assert "cannot be read: " in refused(path=folder)
    (folder / "bad.toml").write_text("model = 'a'\nseed = \n")
    assert refused(path="bad.toml").startswith("config: 'bad.toml' is not valid TOML: ")
    assert "line 2" in refused(path="bad.toml")
    (folder / "bytes.toml").write_bytes(b"model = '\xff'")
    assert "config: 'bytes.toml' cannot be read: " in refused(path="bytes.toml")


def test_a_python_call_reads_neither_default_file_nor_environment(folder, monkeypatch):
    (folder / "hardpoint.toml").write_text("seed = 1")
    monkeypatch.setenv("HARDPOINT__DTYPE", "float32")
    assert config_from()[0] == LoadedConfig()


@pytest.mark.parametrize("as_text", [True, False])
def test_config_from_a_path(folder, as_text):
    (folder / "a.toml").write_text("seed = 1")
    config, config_sources = config_from("a.toml" if as_text else Path("a.toml"))
    assert config.seed == 1
    assert config_sources.of("seed") == "file a.toml"


def test_config_from_a_mapping_and_named_arguments():
    config, config_sources = config_from(
        {"seed": 1, "scheduler": {"policy": "fair"}, "model": Path("some/where")},
        {"seed": 2, "tokenizer.path": "tok", "dtype": None},
    )
    assert (config.seed, config.tokenizer.path, config.dtype) == (2, "tok", "auto")
    assert config.model == str(Path("some/where"))
    assert config_sources.of("seed") == "argument LLM(seed=...)"
    assert config_sources.of("tokenizer.path") == "argument LLM(tokenizer=...)"
    assert config_sources.of("scheduler.policy") == "argument LLM(config=...)"
    assert config_sources.of("dtype") == "default"


def test_a_ready_configuration_is_checked_again():
    config, config_sources = config_from(EngineConfig(seed=3), {"model": "m"})
    assert config == LoadedConfig(seed=3, model="m")
    assert config_sources.of("seed") == "argument LLM(config=...)"
    assert config_sources.of("dtype") == "default"
    with pytest.raises(ConfigError, match="model: expected a string, got 5"):
        config_from(EngineConfig(model=5))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"model": {"a": 1}}, "model: expected a string, got {'a': 1}"),
        (5, "config: expected a path, a mapping or an EngineConfig, got 5"),
        (
            {"model": object()},
            "model: expected plain data: a builtins.object cannot be converted (from argument ",
        ),
        ({5: 1}, "config: expected names as keys, got 5"),
        ({"plugin": {5: {}}}, "plugin: expected names as keys, got 5"),
    ],
)
def test_values_that_python_can_give_and_toml_cannot(value, message):
    with pytest.raises(ConfigError) as caught:
        config_from(value)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("(from argument LLM(config=...))")
