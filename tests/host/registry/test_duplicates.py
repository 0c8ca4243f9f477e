"""Names that several distributions offer: a use of one names both, unless a setting decides."""

from __future__ import annotations

import pytest
from support.plugins.fake import component, on

from hardpoint.errors import PluginConflictError, RequestError
from hardpoint.host.registry.kinds import KINDS, Number, PluginKind, value_at
from hardpoint.plugins import LogitsProcessor, OutputParser, SchedulingPolicy, hookimpl
from hardpoint.plugins.config import ConfigSources, EngineConfig

DEFAULTS = EngineConfig()


class FromFile(ConfigSources):
    """Sources of a configuration of which a file sets every value."""

    def of(self, path: str) -> str:
        return "file hardpoint.toml" if path else "default"


def offered(installed, kind: PluginKind, name: str, distribution: str) -> str:
    """Add an entry point of a kind; return its value."""
    version = "0.1.0" if distribution == "hardpoint" else "2.0"
    if kind.interface is None:

        def engine_closing():
            """Nothing."""

        target = installed.module(
            f"{distribution}_hooks".replace("-", "_"), contract=1, hook=hookimpl(engine_closing)
        )
    elif issubclass(kind.interface, OutputParser):
        target = component(OutputParser, roles=(kind.role,))
    else:
        class_methods = {
            "loaders": {"recognises": classmethod(lambda _cls, _files: False)},
            "activation_taps": {"sites": classmethod(lambda _cls, _arguments: ())},
        }
        form = (kind.forms or (kind.interface,))[0]
        target = component(form, **class_methods.get(kind.name, {}))
    return installed.offer(f"{kind.name}/{name}", target, distribution, version)


def setting(path: str, value: object) -> dict:
    *tables, field = path.split(".")
    config: dict = {field: value}
    for table in reversed(tables):
        config = {table: config}
    return config


def names_both(message: str, kind: PluginKind, name: str) -> bool:
    return all(f"{kind.name}/{name} ({one}" in message for one in ("hardpoint 0.1.0", "acme 2.0"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
class TestEveryKind:
    """A built-in `same`, and a component of another distribution with its name."""

    @pytest.fixture
    def values(self, installed, kind) -> list[str]:
        if kind.name == "kv_stores":  # the setting of their connector follows from theirs
            offered(installed, KINDS["kv_connectors"], "stores", "hardpoint")
        return [offered(installed, kind, "same", package) for package in ("hardpoint", "acme")]

    @pytest.mark.usefixtures("values")
    def test_one_that_nothing_uses_stops_nothing(self, installed, kind):
        plugins = installed.resolve(FromFile())
        assert not [w for w in plugins.warnings if "same" in w]
        is_on = kind.chosen_by is None
        assert (f"{kind.name}/same" in on(plugins)) == is_on
        if is_on:  # for messages and lists of what is on
            assert plugins.get(kind.name, "same").distribution == "hardpoint"

    @pytest.mark.usefixtures("values")
    def test_a_setting_that_uses_it_is_refused(self, installed, kind):
        if kind.chosen_by is None and kind.named_by is None:
            config = {"plugins": {"enable": [f"{kind.name}/same"]}}
        else:
            path = kind.chosen_by or kind.named_by
            is_list = kind.chosen_by and kind.number is Number.MANY
            config = setting(path, ["same"] if is_list else "same")
        with pytest.raises(PluginConflictError) as error:
            installed.resolve(FromFile(), **config)
        assert names_both(str(error.value), kind, "same")
        assert str(error.value).endswith("(from file hardpoint.toml)")

    @pytest.mark.usefixtures("values")
    def test_a_model_or_request_that_uses_it_is_refused(self, installed, kind):
        if kind.chosen_by is not None:
            pytest.skip("only its setting names a component of this kind")
        plugins = installed.resolve()
        for error in (PluginConflictError, RequestError):
            for look_up in (plugins.get, plugins.find):
                with pytest.raises(error) as refused:
                    look_up(kind.name, "same", error)
                assert names_both(str(refused.value), kind, "same")

    def test_an_fqcn_decides(self, installed, kind, values):
        builtin, third = values
        if kind.chosen_by is None and kind.named_by is None:
            plugins = installed.resolve(plugins={"enable": [builtin]})
            assert plugins.get(kind.name, "same", PluginConflictError).value == builtin
            return
        path = kind.chosen_by or kind.named_by
        is_list = kind.chosen_by and kind.number is Number.MANY
        for value in values:
            config = setting(path, [value] if is_list else value)
            if kind.chosen_by is None and value == third:
                config |= {"plugins": {"disable": [f"{kind.name}/same"]}}
            plugins = installed.resolve(FromFile(), **config)
            assert plugins.get(kind.name, "same", PluginConflictError).value == value
            assert not plugins.warnings

    def test_replace_decides(self, installed, kind, values):
        if kind.chosen_by is not None:
            pytest.skip("its setting chooses the component")
        for value in values:
            plugins = installed.resolve(plugins={"replace": {f"{kind.name}/same": value}})
            assert plugins.get(kind.name, "same", PluginConflictError).value == value

    def test_the_default_of_a_setting_stays_the_built_in_with_a_warning(self, installed, kind):
        path = kind.chosen_by or kind.named_by
        name = path and value_at(DEFAULTS, path)
        if not isinstance(name, str) or name in ("auto", "none"):
            pytest.skip("no setting has a component of this kind by default")
        if not any((f.kind, f.name) == (kind.name, name) for f in installed.found):
            offered(installed, kind, name, "hardpoint")
        assert not [w for w in installed.resolve().warnings if "is the name of" in w]
        third = offered(installed, kind, name, "acme")
        plugins = installed.resolve()
        assert plugins.get(kind.name, name).distribution == "hardpoint"
        (warning,) = [w for w in plugins.warnings if "is the name of" in w]
        assert warning.startswith(f"{path}: {name!r} is the name of ")
        assert names_both(warning, kind, name)
        plugins = installed.resolve(FromFile(), **setting(path, third)) if kind.chosen_by else None
        assert plugins is None or not [w for w in plugins.warnings if "is the name of" in w]

    def test_two_strangers_of_which_none_is_enabled_are_both_offered(self, installed, kind):
        values = [offered(installed, kind, "foreign", package) for package in ("acme", "other")]
        hint = installed.resolve().hint("foreign", kind.name)
        assert hint.startswith("; acme 2.0 and other 2.0 offer it: add ")
        assert all(value in hint for value in values)


@pytest.mark.parametrize("kind", ["attention_backends", "ops"])
def test_automatic_choice_among_built_ins_warns(installed, kind):
    offered(installed, KINDS[kind], "torch", "acme")
    plugins = installed.resolve()
    assert [e.distribution for e in plugins.entries(kind)] == ["hardpoint"]
    (warning,) = plugins.warnings
    assert names_both(warning, KINDS[kind], "torch")
    with pytest.raises(PluginConflictError) as error:
        installed.resolve(FromFile(), backend="torch")
    assert names_both(str(error.value), KINDS[kind], "torch")


def test_the_same_class_under_the_same_name_is_no_conflict(installed):
    value = installed.offer("models/Same", component(LogitsProcessor), "hardpoint")
    installed.found.append(type(installed.found[0])("models", "Same", value, "acme", "2.0"))
    assert installed.resolve().get("models", "Same", PluginConflictError).value == value


def test_the_advice_of_a_lookup_works_when_it_is_followed(installed):
    values = [offered(installed, KINDS["models"], "Same", p) for p in ("hardpoint", "acme")]
    with pytest.raises(PluginConflictError) as error:
        installed.resolve().get("models", "Same", PluginConflictError)
    for value in values:
        assert f'plugins.replace = {{ "models/Same" = "{value}" }}' in str(error.value)


def test_another_process_refuses_it_too(installed):
    """A worker has the manifest alone."""
    import msgspec

    from hardpoint.host.registry.plugin_set import PluginSet
    from hardpoint.plugins.component.manifest import Manifest

    for package in ("hardpoint", "acme"):
        offered(installed, KINDS["quantizations"], "same", package)
    manifest = installed.resolve().manifest
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    assert sent.hash == manifest.hash
    with pytest.raises(PluginConflictError, match="acme 2.0"):
        PluginSet(sent).get("quantizations", "same", PluginConflictError)


class TestOtherNames:
    """Output parsers have names beyond that of their entry point."""

    def offer(self, installed, name, distribution):
        target = component(OutputParser, roles=("tools",), other_names=("alias",))
        return installed.offer(f"tool_parsers/{name}", target, distribution)

    def test_of_several_classes(self, installed):
        self.offer(installed, "first", "hardpoint")
        self.offer(installed, "second", "acme")
        plugins = installed.resolve(plugins={"enable": ["second"]})
        with pytest.raises(RequestError) as error:
            plugins.find("tool_parsers", "alias", RequestError)
        assert "tool_parsers/first (hardpoint 2.0, " in str(error.value)
        assert "tool_parsers/second (acme 2.0, " in str(error.value)
        assert plugins.get("tool_parsers", "second", RequestError).distribution == "acme"

    def test_of_one_class(self, installed):
        value = self.offer(installed, "first", "hardpoint")
        assert installed.resolve().get("tool_parsers", "alias", RequestError).value == value


def test_a_policy_that_is_chosen_live(installed):
    """A change of the settings while an engine runs goes the same way."""
    for package in ("acme", "other"):
        installed.offer("scheduling_policies/fair", component(SchedulingPolicy), package)
    with pytest.raises(PluginConflictError, match=r"acme 2\.0.*other 2\.0"):
        installed.resolve(scheduler={"policy": "fair"})
