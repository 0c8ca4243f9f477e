"""Tables of the configuration that plugins of kind `hooks` declare."""

import copy
import pickle
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta
from support.process.harness import process_config, scripted_config

from hardpoint import LLM, EngineConfig, SamplingParams
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.configuration.loading import config_from, load_config
from hardpoint.core.build import log_opening
from hardpoint.errors import ConfigError, PluginConflictError, PluginContractError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import hookimpl
from hardpoint.testing import write_scripted_model
from hardpoint.typed import Options, Strict

SEEN = []


class Quota(Strict):
    """The limits of a client.

    Attributes:
        tokens: tokens in a minute.
        key: text that looks like a number.
    """

    tokens: Annotated[int, Meta(ge=1)] = 100
    key: str = ""


class AcmeConfig(Strict):
    """The table of a stranger's hooks."""

    names: list[str] = []
    quota: Quota = Quota()


class Acme:
    contract = 1
    config_table = ("acme", AcmeConfig)

    @hookimpl
    def engine_started(self, config):
        SEEN.append(config.table(AcmeConfig))

    @hookimpl
    def request_received(self, request):
        tokens = SEEN[-1].quota.tokens
        request.params = msgspec.structs.replace(request.params, max_tokens=tokens)


class Rival(Acme):
    contract = 1


class Greedy(Acme):
    contract = 1
    config_table = ("scheduler", AcmeConfig)


class Server(Acme):
    contract = 1
    config_table = ("server", AcmeConfig)


class Shouts(Acme):
    contract = 1
    config_table = ("Acme", AcmeConfig)


class Needs(Strict):
    where: str


class Unset(Acme):
    contract = 1
    config_table = ("acme", Needs)


class Untyped(Acme):
    contract = 1
    config_table = {"acme": AcmeConfig}


def enabling(*plugins, **tables):
    return {"plugins": {"enable": [f"{__name__}:{p.__name__}" for p in plugins]}, **tables}


@pytest.mark.parametrize("form", [scripted_config, process_config])
def test_hooks_get_their_table_in_both_process_modes(tmp_path, form):
    folder = write_scripted_model(tmp_path)
    tables = enabling(Acme, acme={"names": ["a"], "quota": {"tokens": 3}})
    with LLM(config=form(folder, tables)) as llm:
        expected = AcmeConfig(names=["a"], quota=Quota(tokens=3))
        assert SEEN[-1] == llm.config.table(AcmeConfig) == expected
        (output,) = llm.generate("a", SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3


def test_a_table_has_its_defaults_where_it_is_left_out():
    config, sources = config_from(enabling(Acme))
    assert config.table(AcmeConfig) == AcmeConfig()
    assert config.acme is config.table(AcmeConfig)
    assert sources.of("acme.quota") == "default"


def test_wrong_values_name_path_and_origin(tmp_path):
    file = tmp_path / "acme.toml"
    file.write_text(f'[plugins]\nenable = ["{__name__}:Acme"]\n[acme.quota]\ntokens = 0\n')
    with pytest.raises(
        ConfigError, match=r"acme\.quota\.tokens: .* >= 1.*\(from file .*acme\.toml"
    ):
        load_config(file, environ={})
    environ = {"HARDPOINT__ACME__QUOTA__TOKENS": "x"}
    with pytest.raises(ConfigError, match="got 'x' .from environment HARDPOINT__ACME__QUOTA__TOK"):
        load_config(file, environ=environ)
    with pytest.raises(
        ConfigError, match=r"acme\.qota: unknown field .did you mean 'quota'.*--set"
    ):
        load_config(file, settings=["acme.quota.tokens=1", "acme.qota=1"], environ={})
    settings = ["acme.quota.tokens=5", "acme.quota.key=12"]
    config, sources = load_config(file, settings=settings, environ={})
    assert config.table(AcmeConfig).quota == Quota(tokens=5, key="12")
    assert sources.of("acme.quota.tokens") == "argument --set acme.quota.tokens"
    assert sources.of("acme.quota") == "argument --set acme.quota.tokens and " + (
        "argument --set acme.quota.key"
    )


@pytest.mark.parametrize(
    ("plugins", "error", "message"),
    [
        ((Acme, Rival), PluginConflictError, r"table 'acme': plugin 'acme'.*plugin 'rival'"),
        ((Server,), PluginConflictError, r"table 'server': plugin 'server' \(hard.*'named'"),
        ((Greedy,), PluginConflictError, r"plugin 'greedy'.*Hardpoint itself .* 'scheduler'"),
        ((Shouts,), PluginContractError, r"plugin 'shouts'.*small letters.*got 'Acme'"),
        ((Unset,), PluginContractError, r"plugin 'unset'.*Needs.where needs a default"),
        (
            (Untyped,),
            PluginContractError,
            r"plugin 'untyped'.*such as \(\"acme\", AcmeConfig\), got",
        ),
    ],
)
def test_wrong_tables_are_refused_by_name(plugins, error, message):
    tree = enabling(*plugins)
    if Server in plugins:  # whose name the built-in plugin has
        tree["plugins"]["enable"] = [{"use": tree["plugins"]["enable"][0], "name": "named"}]
    config, sources = config_from(tree)  # so that `hardpoint config` shows the rest
    with pytest.raises(error, match=message):
        resolve_plugins(config, sources)
    if error is PluginConflictError and plugins != (Acme, Rival):
        return
    with pytest.raises(error, match=message):  # and not that the key is unknown
        config_from({**tree, "acme": {}})


def test_a_table_without_its_plugin_is_unknown():
    with pytest.raises(
        ConfigError, match="^acme: unknown field; known here: .*, server, plugin .f"
    ):
        config_from({"acme": {}})
    disabled = {"plugins": {"disable": ["server"]}, "server": {"port": 1}}
    named = r"^server: unknown field.*; hooks/server \(hardpoint.*\) may declare it, and is not en"
    with pytest.raises(ConfigError, match=named):
        config_from(disabled)
    with pytest.raises(ConfigError, match="config: no enabled plugin declares a table of .*:AcmeC"):
        config_from()[0].table(AcmeConfig)


def test_a_plugin_that_is_not_found_is_named_before_its_table():
    with pytest.raises(Exception, match=r"plugins\.enable\[0\]: no installed .* 'acme_quota'"):
        config_from({"plugins": {"enable": ["acme_quota"]}, "acme_quota": {}})


def test_a_configuration_can_be_copied_pickled_and_given_again():
    config, _ = config_from(enabling(Acme, acme={"names": ["a"]}, seed=3))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert config_from(config)[0] == config
    plain = config.without_tables()
    assert type(plain) is EngineConfig
    assert (plain.seed, plain.plugins) == (3, config.plugins)
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_tables_come_before_options_of_plugins_in_a_type_for_each_set():
    config, _ = config_from(enabling(Acme))
    assert config.__struct_fields__[-3:] == ("server", "acme", "plugin")
    assert type(config) is type(config_from(enabling(Acme, seed=1))[0])
    assert type(config) is not type(config_from()[0])
    assert config.table(ServerConfig) == ServerConfig()


def test_set_values_of_tables_are_logged(caplog):
    caplog.set_level("INFO")
    log_opening(*config_from(enabling(Acme, acme={"quota": {"tokens": 3}})))
    assert "acme.quota.tokens = 3 (argument LLM(config=...))" in caplog.text


def test_options_of_components_are_no_table():
    with pytest.raises(ConfigError, match="no enabled plugin declares a table of .*:Options"):
        EngineConfig().table(Options)
