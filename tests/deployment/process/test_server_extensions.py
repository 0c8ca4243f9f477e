"""Server extensions: checked when a plugin returns them; the responsible plugin is named."""

from __future__ import annotations

import pytest

from hardpoint.errors import PluginContractError, PluginFaultError
from hardpoint.host.registry.hooks import HookSet
from hardpoint.plugins import hookimpl
from hardpoint.plugins.component import Source
from hardpoint.plugins.server import Background, Middleware, ResponseStore, Route
from hardpoint.process.server_extensions import server_extensions


def hooks_of(**functions):
    """Return a plugin object with methods that implement hooks of the same names."""
    body = {name: hookimpl(function) for name, function in functions.items()}
    return type("Hooks", (), body | {"contract": 1})()


def hook_set(**plugins):
    hooks = HookSet()
    for name, target in plugins.items():
        hooks.add(target, Source(name, f"acme:{name}", "acme-pack", "2.0", "plugins.enable[0]"))
    return hooks


async def endpoint(request):
    """Answer nothing: no test asks."""


ACME = Route(path="/acme", endpoint=endpoint)


class TestServerExtensions:
    def test_each_is_returned_with_its_plugin_in_order_of_enabling(self):
        hooks = hook_set(
            a=hooks_of(server_extensions=lambda self, server: [ACME]),
            b=hooks_of(server_extensions=lambda self: [Middleware(wrap=lambda app: app)]),
            c=hooks_of(request_finished=lambda self: None),
        )
        first, second = server_extensions(hooks, None)
        assert (first.plugin, first.extension) == ("a", ACME)
        assert second.plugin == "b"
        assert first.source.startswith("plugin 'a' (acme-pack 2.0")

    def test_a_failure_names_the_plugin(self):
        def fail(self, server):
            raise KeyError("x")

        hooks = hook_set(audit=hooks_of(server_extensions=fail))
        with pytest.raises(PluginFaultError) as error:
            server_extensions(hooks, None)
        message = str(error.value)
        assert message.startswith("plugin 'audit' (acme-pack 2.0")
        assert "its hook server_extensions failed: KeyError: 'x'" in message

    @pytest.mark.parametrize("returned", [None, 5, [5], "route", [ACME, None]])
    def test_another_result_is_refused(self, returned):
        hooks = hook_set(audit=hooks_of(server_extensions=lambda self: returned))
        with pytest.raises(PluginContractError) as error:
            server_extensions(hooks, None)
        expected = (
            "must return a list of Route, Middleware, Transform, Authenticator, ResponseStore"
        )
        assert expected in str(error.value)

    @pytest.mark.parametrize(
        ("extension", "message"),
        [
            (
                ResponseStore(put=endpoint, get=len, delete=endpoint),
                "its ResponseStore: get: expected an `async def`, got a plain function",
            ),
            (
                ResponseStore(put=endpoint, get=endpoint, delete=endpoint, retain_seconds=0),
                "its ResponseStore: retain_seconds: expected seconds > 0 or None, got 0",
            ),
            (Background(run=None), "its Background: run: expected an `async def`, got None"),
            (
                Route(path="/acme", endpoint=endpoint, body_types="text/plain"),
                "body_types: expected media types in lower case, got 'text/plain'",
            ),
            (
                Route(path="/acme", endpoint=endpoint, body_types=["Text/Plain"]),
                "body_types: expected media types in lower case, got ['Text/Plain']",
            ),
        ],
        ids=["plain", "seconds", "none", "text", "case"],
    )
    def test_a_wrong_extension_is_refused(self, extension, message):
        hooks = hook_set(audit=hooks_of(server_extensions=lambda self: [extension]))
        with pytest.raises(PluginContractError) as error:
            server_extensions(hooks, None)
        assert message in str(error.value)
