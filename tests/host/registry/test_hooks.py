"""Hooks: checked when registered, and the responsible plugin is named when one fails."""

from __future__ import annotations

import functools

import pytest

from hardpoint.errors import PluginContractError, PluginFaultError, PluginLoadError
from hardpoint.host.registry.hooks import HookSet
from hardpoint.plugins import CompletionOutput, RequestOutput, hookimpl
from hardpoint.plugins.component import Source
from hardpoint.plugins.server.hook_specs import HookSpecs


def source(name):
    return Source(name, f"acme:{name}", "acme-pack", "2.0", "plugins.enable[0]")


def hooks_of(**functions):
    """Return a plugin object whose methods implement hooks of the same names."""
    body = {name: hookimpl(function) for name, function in functions.items()}
    return type("Hooks", (), body | {"contract": 1})()


def hook_set(**plugins):
    hooks = HookSet()
    for name, target in plugins.items():
        hooks.add(target, source(name))
    return hooks


OUTPUT = RequestOutput(
    request_id="r",
    prompt=None,
    prompt_token_ids=[1],
    outputs=[CompletionOutput(index=0, text="", token_ids=[2])],
    finished=True,
)


class TestRegistering:
    def test_an_unknown_hook_names_the_plugin_and_the_hooks(self):
        with pytest.raises(PluginContractError) as error:
            hook_set(audit=hooks_of(request_finnished=lambda self, output: None))
        message = str(error.value)
        assert message.startswith("plugin 'audit' (acme-pack 2.0, acme:audit), asked for by ")
        assert "unknown hook 'request_finnished'" in message
        assert "hooks are: engine_started, engine_closing, step_planned" in message

    def test_an_unknown_argument_names_the_plugin_and_the_argument(self):
        with pytest.raises(PluginContractError) as error:
            hook_set(audit=hooks_of(request_finished=lambda self, outputs: None))
        assert str(error.value).startswith("plugin 'audit' (acme-pack 2.0")
        assert "outputs" in str(error.value)
        assert "\n" not in str(error.value)

    def test_arguments_may_be_left_out(self):
        called = []
        hooks = hook_set(audit=hooks_of(request_finished=lambda self: called.append(1)))
        hooks.call("request_finished", output=OUTPUT)
        assert called == [1]

    def test_a_class_is_made_without_arguments(self):
        cls = type(hooks_of(engine_closing=lambda self: "made"))
        assert hook_set(audit=cls).call("engine_closing") == ["made"]

    def test_a_constructor_that_fails_names_the_plugin(self):
        class Broken:
            contract = 1

            def __init__(self):
                raise KeyError("no home")

            @hookimpl
            def engine_closing(self):
                """Nothing."""

        with pytest.raises(
            PluginLoadError, match=r"plugin 'audit'.*its constructor failed: KeyErr"
        ):
            hook_set(audit=Broken)


class TestCalling:
    def test_has_tells_whether_anybody_listens(self):
        hooks = hook_set(audit=hooks_of(engine_closing=lambda self: None))
        assert hooks.has("engine_closing")
        assert not hooks.has("engine_started")
        assert not HookSet().has("engine_closing")

    def test_a_hook_without_listeners_returns_nothing(self):
        assert HookSet().call("engine_closing") == []

    def test_the_last_enabled_is_called_first(self):
        hooks = hook_set(
            one=hooks_of(engine_closing=lambda self: "one"),
            two=hooks_of(engine_closing=lambda self: "two"),
        )
        assert hooks.call("engine_closing") == ["two", "one"]

    def test_a_failure_names_the_responsible_one_of_several(self):
        def fail(self, output):
            return {}[output.request_id]

        hooks = hook_set(
            good=hooks_of(request_finished=lambda self, output: None),
            bad=hooks_of(request_finished=fail),
            fine=hooks_of(request_finished=lambda self, output: None),
        )
        with pytest.raises(PluginFaultError) as error:
            hooks.call("request_finished", output=OUTPUT)
        assert str(error.value) == (
            "plugin 'bad' (acme-pack 2.0, acme:bad), asked for by plugins.enable[0]: "
            "its hook request_finished failed: KeyError: 'r'"
        )
        assert isinstance(error.value.__cause__, KeyError)

    def test_a_failure_deep_inside_is_still_the_hooks(self):
        def deep(self):
            return [int(word) for word in ["x"]]

        hooks = hook_set(bad=hooks_of(engine_closing=deep))
        with pytest.raises(PluginFaultError, match=r"plugin 'bad' .*failed: ValueError: invalid"):
            hooks.call("engine_closing")

    def test_two_objects_of_one_class_are_distinguished(self):
        """Their functions are the same code, so the traceback alone is not enough."""

        class Twin:
            contract = 1

            def __init__(self, fails):
                self.fails = fails

            @hookimpl
            def engine_closing(self):
                if self.fails:
                    raise RuntimeError("I did it")

        for fails in ((True, False), (False, True)):
            hooks = hook_set(one=Twin(fails[0]), two=Twin(fails[1]))
            responsible = "one" if fails[0] else "two"
            with pytest.raises(PluginFaultError, match=f"^plugin '{responsible}' "):
                hooks.call("engine_closing")

    def test_a_decorated_function_is_recognised(self):
        def wrap(function):
            @functools.wraps(function)
            def wrapper(self):
                raise RuntimeError("in the wrapper")

            return wrapper

        hooks = hook_set(bad=hooks_of(engine_closing=wrap(lambda self: None)))
        with pytest.raises(PluginFaultError, match=r"^plugin 'bad' .*in the wrapper"):
            hooks.call("engine_closing")


def test_every_hook_documents_the_process_it_is_called_in():
    hooks = {name: hook for name, hook in vars(HookSpecs).items() if not name.startswith("_")}
    assert hooks
    for name, hook in hooks.items():
        assert hook.__doc__.startswith("["), f"{name} does not say where it is called"


def test_enabled_hooks_are_registered_and_others_are_not(installed):
    target = hooks_of(engine_closing=lambda self: "closed")
    installed.offer("hooks/audit", target)
    assert installed.resolve().hooks().call("engine_closing") == []
    plugins = installed.resolve(plugins={"enable": ["audit"]})
    assert plugins.hooks().call("engine_closing") == ["closed"]
