"""The scheduling policy of an engine: guarded against its faults, and replaceable while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import msgspec

from hardpoint.errors import PluginFaultError, shown
from hardpoint.host.registry.blame import faults_as
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.host.registry.request_arguments import (
    argument_key,
    convert_arguments,
    given_fields,
    prepare_arguments,
    prepares,
    takes_arguments,
)
from hardpoint.plugins import (
    ConfigError,
    EngineCoreRequest,
    PolicyContext,
    PrepareContext,
    Request,
    RequestError,
    SamplingParams,
    Scheduler,
    SchedulingPolicy,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.manifest import PluginEntry
from hardpoint.typed import ReadOnlyList, prepared_type, read_only

from .activity import PluginCalls
from .errors import close_named
from .faults import FaultReporter, StepFaults
from .guard import SortKey, boundary_of, guard

_KIND = "scheduling_policies"
_CONFIG_PATH = "scheduler.policy"


def guarded_policy(
    policy: SchedulingPolicy,
    report: FaultReporter,
    calls: PluginCalls | None = None,
    arguments: PolicyArguments | None = None,
) -> SchedulingPolicy:
    """Return a policy that decides as fcfs does where another one fails; it shows that one views.

    Args:
        calls: call the policy's methods; without them, they are called directly.
        arguments: convert the arguments of its requests; without them, requests have none.
    """

    def view(request: Request) -> Request:
        """Return the view of a request, always the same, since policies compare identities."""
        shown_as = request.view
        if shown_as is None:
            if arguments is not None:
                request.arguments = arguments.of(request.source)
            shown_as = request.view = RequestView(request)
        return shown_as

    def views(running: Sequence[Request]) -> tuple[Request, ...]:
        return tuple(map(view, running))

    guarded = guard(policy, _KIND, report, calls, {"request": view, "running": views})
    failing, group_key = boundary_of(guarded).failing, guarded.group_key

    def key_of_group(group: Hashable, now: float) -> Any:
        if group is None and "group" in failing:  # the policy may not know this one
            return SortKey(group)
        return group_key(group, now)

    vars(guarded)["group_key"] = key_of_group
    return guarded


class RequestView(Request):
    """A live request as policies see it: always current, and nothing of it can be changed."""

    __slots__ = ("_copies", "_request")

    _copies: dict[str, Any]
    _request: Request

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "_copies", {})

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        params: SamplingParams = self._copy("params")
        return params

    @property
    def tags(self) -> dict[str, str]:
        """User-defined labels, such as {"tenant": "acme"}."""
        tags: dict[str, str] = self._copy("tags")
        return tags

    def append(self, token: int) -> None:  # noqa: ARG002
        """Refuse: the scheduler adds tokens."""
        self._refuse("output_token_ids")

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the known tokens from position `start` up to `end`, of prompt and output."""
        return self._request.token_ids(start, end)

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse(name)

    def __delattr__(self, name: str) -> None:
        self._refuse(name)

    def _copy(self, name: str) -> Any:
        if name not in self._copies:
            self._copies[name] = read_only(getattr(self._request, name))
        return self._copies[name]

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name}: a request is read-only for policies; its scheduler writes it"
        )


def _view_property(name: str) -> property:
    if name == "source":
        return property(lambda view: view._copy(name))
    if name in ("draft_token_ids", "events"):  # short lists, mostly empty
        return property(lambda view: ReadOnlyList(getattr(view._request, name)))
    return property(attrgetter(f"_request.{name}"))  # as fast as it can be: no Python function


for _name in Request.__slots__:
    setattr(RequestView, _name, _view_property(_name))


class PolicyArguments:
    """Converts the arguments that requests have for one policy.

    Attributes:
        takes_any: whether the policy takes arguments.
    """

    def __init__(self, entry: PluginEntry, cls: Any, options: Any, vocab_size: int) -> None:
        self.takes_any = takes_arguments(cls)
        self.key = argument_key(_KIND, entry.name)
        self.cls = cls
        self._entry = entry
        self._options = options
        self._vocab_size = vocab_size
        self._path = f"plugin_args.{entry.name}"
        self._defaults = prepared_type(cls)()

    def of(self, request: EngineCoreRequest) -> Any:
        """Return the arguments of a request as the policy gets them.

        Raises:
            RequestError: they do not fit.
        """
        plain = request.plugin_args.get(self.key)
        if plain is None:
            return self._defaults
        return convert_arguments(self._entry.source, prepared_type(self.cls), plain, self._path)

    def carried_over(
        self, request: EngineCoreRequest, replaced: Mapping[str, PolicyArguments]
    ) -> dict[str, dict[str, Any]]:
        """Return `plugin_args` of a request that was resolved for another policy.

        The caller's arguments are converted, and prepared without a tokenizer.

        Args:
            request: live, or arriving.
            replaced: the policies that the engine has had, by key.

        Raises:
            RequestError: it does not fit this policy.
        """
        others = {k: v for k, v in request.plugin_args.items() if not k.startswith(f"{_KIND}/")}
        fields: dict[str, Any] = {}
        for key in request.plugin_args.keys() - others.keys():
            plain, before = request.plugin_args[key], replaced.get(key)
            if before is not None and before.cls is self.cls:
                return {**others, self.key: plain}
            fields |= plain if before is None else given_fields(before.cls.Arguments, plain)
        if fields and not self.takes_any:
            raise RequestError(f"{self._path}: {self.key} takes no arguments, got {shown(fields)}")
        source, path = self._entry.source, self._path
        arguments = convert_arguments(source, self.cls.Arguments, fields, path)
        if prepares(self.cls):
            context = PrepareContext(
                options=self._options,
                params=read_only(request.params),
                prompt_token_ids=ReadOnlyList(request.known_prompt_ids),
                stop_token_ids=request.stop_token_ids,
                vocab_size=self._vocab_size,
                tokenizer=None,
            )
            arguments = prepare_arguments(source, self.cls, arguments, context, path)
        elif not fields:
            return others
        return {**others, self.key: msgspec.to_builtins(arguments, str_keys=False)}


@dataclass(frozen=True)
class NewPolicy:
    """A guarded policy, and the plugins that it is of."""

    plugins: PluginSet
    entry: PluginEntry
    policy: SchedulingPolicy
    arguments: PolicyArguments

    @property
    def source(self) -> Source:
        """Names it."""
        return self.entry.source

    def close(self) -> None:
        """Close the policy.

        Raises:
            PluginFaultError: its `close` failed.
        """
        close_named(self.source, self.policy.close)


class PolicySlot:
    """Holds an engine's policy, guarded, and replaces it on a running engine.

    Attributes:
        policy: the policy that schedulers call.
    """

    def __init__(self, plugins: PluginSet, faults: StepFaults, vocab_size: int) -> None:
        """Build the configured policy.

        Raises:
            PluginLoadError: its constructor failed.
        """
        self._faults = faults
        self._vocab_size = vocab_size
        self._replaced: dict[str, PolicyArguments] = {}
        self._use(self._build(plugins))

    def report_fault(self, message: str) -> None:
        """Report a fault of the policy that the scheduler noticed."""
        boundary_of(self.policy).report(message, None)

    def take_arguments(self, request: EngineCoreRequest) -> None:
        """Check a new request's arguments for the policy.

        Arguments for a policy that was replaced while the request was sent are converted.

        Raises:
            RequestError: they do not fit.
        """
        if not self._replaced.keys().isdisjoint(request.plugin_args):
            request.plugin_args = self._current.arguments.carried_over(request, self._replaced)
        self._current.arguments.of(request)

    def build(self, plugins: PluginSet, *, always: bool) -> NewPolicy | None:
        """Build the policy of another plugin set; None, unless `always`, if it is the one in use.

        Raises:
            PluginLoadError: its constructor failed.
        """
        if not always and self._current.entry.is_same(plugins.one(_KIND)):
            return None
        return self._build(plugins)

    def use(self, new: NewPolicy, scheduler: Scheduler) -> NewPolicy:
        """Replace the policy between two steps; return the old one, which is still open.

        If anything fails, the old one stays, and each request keeps its arguments.

        Raises:
            ConfigError: the arguments of a live request do not fit; names it and their path.
            PluginFaultError: `export_state` or `import_state` failed.
            Exception: an error of the scheduler.
        """
        old = self._current
        with contextlib.ExitStack() as undo:
            carried_over = self._carried_over(new.arguments, scheduler)
            if new.policy.state_format and new.policy.state_format == old.policy.state_format:
                with faults_as(PluginFaultError, f"{old.source}: export_state()"):
                    state = old.policy.export_state()
                with faults_as(PluginFaultError, f"{new.source}: import_state()"):
                    new.policy.import_state(state)
            for request, plugin_args in carried_over:
                before = request.source.plugin_args, request.arguments, request.view
                undo.callback(_restore, request, *before)
                # The new policy gets a view of its own, which has the new arguments.
                request.source.plugin_args, request.view = plugin_args, None
            scheduler.set_policy(new.policy)
            undo.pop_all()
        self._replaced[old.arguments.key] = old.arguments
        self._replaced.pop(new.arguments.key, None)
        self._use(new)
        return old

    def _use(self, new: NewPolicy) -> None:
        self._current, self.policy = new, new.policy

    @property
    def plugins(self) -> PluginSet:
        """The plugins that the policy is of."""
        return self._current.plugins

    def close(self) -> None:
        """Close the policy; see `NewPolicy.close`."""
        self._current.close()

    def _build(self, plugins: PluginSet) -> NewPolicy:
        entry = plugins.one(_KIND)
        policy = plugins.create(entry, PolicyContext)
        calls = self._faults.calls(_KIND, entry.source)
        arguments = PolicyArguments(
            entry, plugins.target(entry), plugins.options(entry), self._vocab_size
        )
        reporter = self._faults.reporter(entry.source)
        guarded = guarded_policy(policy, reporter, calls, arguments)
        return NewPolicy(plugins, entry, guarded, arguments)

    def _carried_over(
        self, arguments: PolicyArguments, scheduler: Scheduler
    ) -> list[tuple[Request, dict[str, dict[str, Any]]]]:
        """Return the live requests, each with its `plugin_args` for a new policy."""
        before = self._current.arguments
        if not (arguments.takes_any or before.takes_any):
            return []
        if not scheduler.num_unfinished_requests():
            return []
        try:
            live = list(scheduler.live_requests())
        except NotImplementedError as cause:
            raise ConfigError(
                f"{_CONFIG_PATH}: the arguments of live requests cannot be converted: {cause}"
            ) from None
        known, result = {before.key: before}, []
        for request in live:
            try:
                result.append((request, arguments.carried_over(request.source, known)))
            except RequestError as cause:
                name = request.source.external_req_id or request.request_id
                raise ConfigError(
                    f"{_CONFIG_PATH}: request {name!r} does not fit the new policy: {cause}"
                ) from cause
        return result


def _restore(
    request: Request,
    plugin_args: dict[str, dict[str, Any]],
    arguments: Any,
    view: Request | None,
) -> None:
    request.source.plugin_args, request.arguments, request.view = plugin_args, arguments, view
