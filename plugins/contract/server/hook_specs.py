"""Hooks: behaviour that is not a component. Specified with pluggy.

A plugin of kind `hooks` is a module, a class or an object that marks functions with `hookimpl` and
states `contract = 1`. Hook names and argument names are checked when it is registered. Arguments
that an implementation does not need may be left out.

A class has options as components have: a class `Options` in its body, derived from
`hardpoint.plugins.Options`, checks the table `[plugin.<name>]`. An object of it is made in each
process that calls hooks: of `__init__(self, context)` with a `HookContext`, which holds them, of
another one without arguments. Modules and objects have no options.

It may declare a table of the configuration as `config_table = ("acme", AcmeConfig)`: the table's
name and its type, a class derived from `hardpoint.typed.Strict` with a default for every field.
While the plugin is enabled, `[acme]` is checked as the tables of Hardpoint itself are, and
`config.table(AcmeConfig)` returns it, of the configuration that hooks and commands get. It does not
travel to the engine's process and its workers. Give it the name of the plugin's entry point: the
error about a table that no enabled plugin declares then names the plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

from hardpoint.plugins.requests.outputs import RequestOutput
from hardpoint.plugins.requests.params import EngineCoreRequest

from .hooks import hookimpl

if TYPE_CHECKING:
    from hardpoint.plugins.config.engine import EngineConfig
    from hardpoint.plugins.scheduling.step_record import StepRecord

    from .commands import Command
    from .extension import ServerExtension
    from .generator import ServerContext

_hookspec = pluggy.HookspecMarker(hookimpl.project_name)

ENGINE_HOOKS = ("step_planned",)
"""Hooks that the engine calls, which may have a process of its own."""


class HookSpecs:
    """Every hook. The process that calls it is in brackets.

    Arguments are read-only copies, at any depth, except the request of `request_received`.
    """

    @_hookspec
    def engine_started(self, info: Mapping[str, object], config: EngineConfig) -> None:
        """[frontend] The engine is ready.

        `info` holds model, dtype, max_model_len, num_blocks and load_seconds; `config.table` has
        the plugin's own table of the configuration. An error here closes the engine and is raised
        to its caller.
        """

    @_hookspec
    def engine_closing(self) -> None:
        """[frontend] The engine is about to close; requests still running are aborted."""

    @_hookspec
    def step_planned(self, record: StepRecord) -> None:
        """[engine] A step was planned and is about to run.

        Runs in every step, before the model, and should be fast. An error here ends nothing; it is
        counted in `LLM.plugins.health()`. Without an implementation no record is made.
        """

    @_hookspec
    def request_received(self, request: EngineCoreRequest) -> None:
        """[frontend] A request was checked and is about to enter the engine.

        Called for each of the `n` completions. May change the fields: they are checked again, and
        an invalid value rejects the request, naming the plugin and the field.
        `external_req_id` (the user's id), `request_id` (the internal one), `child_index` and
        `client_index` must not change. `plugin_args` holds the arguments for each component, as its
        `prepare` returned them; arguments of parameters that change in `params` are prepared again.
        Raising a ValueError rejects the request with that message; any other error also rejects
        it, and names the plugin.
        """

    @_hookspec
    def request_finished(self, output: RequestOutput) -> None:
        """[frontend] The last output of a request is about to be returned.

        An error here ends that request with `finish_reason="error"`, naming the plugin. Not
        called for aborted requests, whether they return a last output or not.
        """

    @_hookspec
    def hardpoint_components(self) -> Mapping[str, Callable[..., object]]:  # type: ignore[empty-body]
        """[frontend] Return components of any kind, by name.

        Plugins that `plugins.enable` accepts by FQCN: classes that derive from an interface,
        functions that make callables for requests. The kind follows from the interface, an output
        parser's from its roles; a name may begin with it (`"samplers/gumbel"`). Other processes
        import the components, so each has to be found by its module and name there.

        While the plugin is enabled, its components are chosen and enabled by their names, like
        entry points. Called before any component is made, and more than once: in a class,
        it is a static method.
        """

    @_hookspec
    def cli_commands(self) -> Sequence[Command]:  # type: ignore[empty-body]
        """[command line] Return commands to add to `hardpoint`."""

    @_hookspec
    def server_extensions(  # type: ignore[empty-body]
        self, server: ServerContext
    ) -> Sequence[ServerExtension]:
        """[frontend] Return routes, middleware, transforms and authenticators to add to a server.

        Called once, when an HTTP server starts and the engine is ready. An error here keeps the
        server from starting, as does a route that the server has already, unless
        `server.replace_routes` lists it.
        """
