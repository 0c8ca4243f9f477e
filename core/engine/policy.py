"""The scheduling policy of an engine: guarded against its faults, and replaceable while it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.boundary.activity import PluginCalls, tracked
from hardpoint.boundary.faults import FaultReporter, StepFaults
from hardpoint.errors import PluginFaultError, shown
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    EngineCoreRequest,
    Load,
    PolicyContext,
    PrepareContext,
    Request,
    RequestError,
    Scheduler,
    SchedulingPolicy,
)
from hardpoint.plugins.arguments import prepared_type
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.manifest import PluginEntry, Source
from hardpoint.plugins.request import RequestView
from hardpoint.plugins.scheduling_policy import OPTIONAL_METHODS
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.discovery import is_third_party
from hardpoint.registry.plugin_set import PluginSet
from hardpoint.registry.references import with_references
from hardpoint.registry.request_arguments import (
    argument_key,
    convert_arguments,
    given_fields,
    prepare_arguments,
    prepares,
    takes_arguments,
)
from hardpoint.registry.selection import Selection
from hardpoint.typed import convert
from hardpoint.typed.read_only import ReadOnlyList, read_only

_KIND = "scheduling_policies"
_METHODS = ("key", *OPTIONAL_METHODS, "export_state", "import_state", "close")
_CONFIG_PATH = "scheduler.policy"
_ORIGIN = "set_policy()"

_short = functools.partial(shown, limit=60)


class GuardedPolicy(SchedulingPolicy):
    """Calls a policy, and decides as fcfs does where the policy fails or returns an unusable value.

    The policy gets read-only views of the requests.

    Attributes:
        wrapped: the policy itself.
        report: the reporter of its faults.
        arguments: convert the arguments of its requests; without them, requests have none.
    """

    contract = 1

    def __init__(
        self,
        policy: SchedulingPolicy,
        report: FaultReporter,
        calls: PluginCalls | None = None,
        arguments: PolicyArguments | None = None,
    ) -> None:
        """Guard a policy.

        Args:
            policy: to guard.
            report: is called with each fault.
            calls: call the policy's methods; without them, they are called directly.
            arguments: as the attribute.
        """
        super().__init__(policy.context)
        self.arguments = arguments
        self.wrapped = policy
        self._policy = policy if calls is None else tracked(policy, calls, _METHODS)
        self.report = report
        self._overridden = policy.overridden
        self._request_keys = _KeyChecker("key() of request", report)
        self._group_keys = _KeyChecker("group_key() of group", report)
        self._replaced_a_group = False
        # A class variable of every other policy; here it is that of the wrapped one.
        vars(self)["state_format"] = policy.state_format

    @property
    def overridden(self) -> frozenset[str]:
        """Names of the optional methods that the wrapped policy overrides."""
        return self._overridden

    def key(self, request: Request) -> Any:
        """Return the policy's key in a wrapper that compares with every other one."""
        request_id, arrival = request.request_id, request.arrival_time
        try:
            value = self._policy.key(_view(request, self))
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("key", request, cause)
            return _Key(request_id, arrival)
        return _Key(request_id, arrival, value, self._request_keys.check(value, request_id))

    def group(self, request: Request) -> Hashable:
        """Return the policy's group, or None if the group cannot be compared."""
        try:
            group = self._policy.group(_view(request, self))
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("group", request, cause)
        else:
            if group is None or _is_group(group):
                return group
            self.report(
                f"group() of request {request.request_id!r} returned {_short(group)}, "
                f"expected something hashable that is equal to itself",
                None,
            )
        self._replaced_a_group = True
        return None

    def group_key(self, group: Hashable, now: float) -> Any:
        """Return the policy's key of a group in a wrapper that compares with every other one."""
        if group is None and self._replaced_a_group:  # the policy may not know this one
            return _Key(group)
        try:
            value = self._policy.group_key(group, now)
        except BaseException as cause:
            raise_unless_fault(cause)
            self.report(f"group_key() of group {_short(group)} failed", cause)
            return _Key(group)
        return _Key(group, 0.0, value, self._group_keys.check(value, group))

    def admit(self, request: Request, load: Load) -> str | None:
        """Return why the policy holds a request back; None admits it."""
        try:
            reason = self._policy.admit(_view(request, self), load)
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("admit", request, cause)
            return None
        if reason is None:
            return None
        if isinstance(reason, str) and (text := str.__str__(reason)):  # a subclass may do anything
            return text
        self.report(
            f"admit() of request {request.request_id!r} returned {_short(reason)}, "
            f"expected None or the reason as a string that is not empty",
            None,
        )
        return None

    def victim(self, running: Sequence[Request], load: Load) -> Request:
        """Return the policy's victim, or the request admitted last."""
        views = tuple(_view(request, self) for request in running)
        try:
            victim = self._policy.victim(views, load)
        except BaseException as cause:
            raise_unless_fault(cause)
            self.report("victim() failed", cause)
        else:
            for request, view in zip(running, views, strict=True):
                if victim is view:
                    return request
            self.report(f"victim() returned {_short(victim)}, which is not running", None)
        return running[-1]

    def added(self, request: Request) -> None:
        """Notify the policy."""
        try:
            self._policy.added(_view(request, self))
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("added", request, cause)

    def scheduled(self, request: Request, tokens: int) -> None:
        """Notify the policy."""
        try:
            self._policy.scheduled(_view(request, self), tokens)
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("scheduled", request, cause)

    def preempted(self, request: Request) -> None:
        """Notify the policy."""
        try:
            self._policy.preempted(_view(request, self))
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("preempted", request, cause)

    def finished(self, request: Request) -> None:
        """Notify the policy."""
        try:
            self._policy.finished(_view(request, self))
        except BaseException as cause:
            raise_unless_fault(cause)
            self._failed("finished", request, cause)

    def export_state(self) -> Any:
        """Return the policy's state; its errors are the caller's to handle."""
        return self._policy.export_state()

    def import_state(self, state: Any) -> None:
        """Pass on the state of another policy; errors are the caller's to handle."""
        self._policy.import_state(state)

    def close(self) -> None:
        """Close the policy."""
        self._policy.close()

    def _failed(self, method: str, request: Request, cause: BaseException) -> None:
        self.report(f"{method}() of request {request.request_id!r} failed", cause)


def _view(request: Request, policy: GuardedPolicy) -> RequestView:
    """Return the view of a request, always the same one, since policies compare identities."""
    view = request.view
    if view is None:
        if policy.arguments is not None:
            request.arguments = policy.arguments.of(request.source)
        view = request.view = RequestView(request)
    return view


class _KeyChecker:
    """Checks the keys that one method of a policy returns, and reports what is wrong with them."""

    def __init__(self, subject: str, report: FaultReporter) -> None:
        """`subject` begins the messages: the method and what it was called with."""
        self._subject = subject
        self._report = report

    def check(self, value: Any, owner: Hashable) -> _KeyChecker | None:
        """Return self if a value has an order; otherwise report it and return None.

        Args:
            value: what the method returned.
            owner: the request id or group that it is the key of.
        """
        cause: BaseException | None = None
        defect = "is not equal to itself"
        try:
            bool(value < value)
            if _equals_itself(value):
                return self
        except BaseException as error:
            raise_unless_fault(error)
            defect, cause = "has no order", error
        message = f"{self._subject} {_short(owner)} returned {_short(value)}, which {defect}"
        self._report(message, cause)
        return None

    def report_incomparable(self, one: _Key, other: _Key, cause: BaseException) -> None:
        """Report two keys that do not compare."""
        owners = f"{_short(one.owner)} and {_short(other.owner)}"
        self._report(f"{self._subject}s {owners} do not compare", cause)


class _Key:
    """A key of a policy that compares with every other one, whatever its value is.

    Keys without a usable value are ordered by arrival time: that of a request, and 0 for a group,
    so that such groups are equal.
    """

    __slots__ = ("arrival", "checker", "is_reported", "owner", "value")

    def __init__(
        self,
        owner: Hashable,
        arrival: float = 0.0,
        value: Any = None,
        checker: _KeyChecker | None = None,
    ) -> None:
        """Without a `checker`, the value is not usable."""
        self.owner = owner
        self.arrival = arrival
        self.value = value
        self.checker = checker
        self.is_reported = False

    def __lt__(self, other: _Key) -> bool:
        if self.checker is not None and other.checker is not None:
            try:
                return bool(self.value < other.value)
            except BaseException as cause:
                raise_unless_fault(cause)
                if not (self.is_reported and other.is_reported):  # once is enough
                    self.is_reported = other.is_reported = True
                    self.checker.report_incomparable(self, other, cause)
        return self.arrival < other.arrival

    def __eq__(self, other: object) -> bool:
        # By order alone, so that values which only have `<` can be equal.
        return isinstance(other, _Key) and not (self < other or other < self)

    __hash__ = None  # type: ignore[assignment]


def _equals_itself(value: Any) -> bool:
    """Return whether a value is equal to itself; NaN is not, nor is a sequence with NaN."""
    if isinstance(value, tuple | list):  # these compare identical members as equal
        return all(map(_equals_itself, value))
    return bool(value == value)


def _is_group(value: Any) -> bool:
    """Return whether a value is hashable and equal to itself, so that it can be a group."""
    try:
        hash(value)
        return _equals_itself(value)
    except BaseException as cause:
        raise_unless_fault(cause)
        return False


class PolicyArguments:
    """Converts the arguments that requests have for one policy.

    Attributes:
        takes_any: whether the policy takes arguments.
    """

    def __init__(self, entry: PluginEntry, cls: Any, options: Any, vocab_size: int) -> None:
        """Create the defaults, for requests without arguments.

        Args:
            entry: of the policy.
            cls: its class.
            options: of the policy.
            vocab_size: of the model.
        """
        self.takes_any = takes_arguments(cls)
        self.key = argument_key(_KIND, entry.name)
        self.cls = cls
        self._entry = entry
        self._options = options
        self._vocab_size = vocab_size
        self._path = f"plugin_args.{entry.name}"
        self._defaults = prepared_type(cls)()

    def of(self, request: EngineCoreRequest) -> Any:
        """Return what the policy gets as the arguments of a request.

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

        What its caller gave is converted, and prepared without a tokenizer.

        Args:
            request: live, or arriving.
            replaced: the policies that the engine has had, by key.

        Raises:
            RequestError: it does not fit this policy.
        """
        kept = {k: v for k, v in request.plugin_args.items() if not k.startswith(f"{_KIND}/")}
        given: dict[str, Any] = {}
        for key in request.plugin_args.keys() - kept.keys():
            plain, before = request.plugin_args[key], replaced.get(key)
            if before is not None and before.cls is self.cls:
                return {**kept, self.key: plain}
            given |= plain if before is None else given_fields(before.cls.Arguments, plain)
        if given and not self.takes_any:
            raise RequestError(f"{self._path}: {self.key} takes no arguments, got {shown(given)}")
        source, path = self._entry.source, self._path
        arguments = convert_arguments(source, self.cls.Arguments, given, path)
        if prepares(self.cls):
            context = PrepareContext(
                options=self._options,
                params=read_only(request.params),
                prompt_token_ids=ReadOnlyList(request.prompt_token_ids),
                stop_token_ids=request.stop_token_ids,
                vocab_size=self._vocab_size,
                tokenizer=None,
            )
            arguments = prepare_arguments(source, self.cls, arguments, context, path)
        elif not given:
            return kept
        return {**kept, self.key: msgspec.to_builtins(arguments, str_keys=False)}


class PolicySlot:
    """Holds an engine's policy, guarded, and replaces it on a running engine.

    Attributes:
        policy: what schedulers call.
    """

    def __init__(self, plugins: PluginSet, faults: StepFaults, vocab_size: int) -> None:
        """Build the configured policy.

        Raises:
            PluginLoadError: its constructor failed.
        """
        self._faults = faults
        self._vocab_size = vocab_size
        self.policy: GuardedPolicy
        self._source: Source
        self._arguments: PolicyArguments
        self._replaced: dict[str, PolicyArguments] = {}
        self.policy, self._source, self._arguments = self._build(plugins)

    def report_fault(self, message: str) -> None:
        """Report a fault of the policy that the scheduler noticed."""
        self.policy.report(message, None)

    def take_arguments(self, request: EngineCoreRequest) -> None:
        """Check a new request's arguments for the policy.

        Those for a policy that was replaced while the request was sent are converted.

        Raises:
            RequestError: they do not fit.
        """
        if any(key in self._replaced for key in request.plugin_args):
            request.plugin_args = self._arguments.carried_over(request, self._replaced)
        self._arguments.of(request)

    def replace(self, plugins: PluginSet, scheduler: Scheduler) -> None:
        """Replace the policy by that of another plugin set, between two steps.

        If anything fails, the old one stays, and each request keeps its arguments.

        Raises:
            ConfigError: the arguments of a live request do not fit; names it and their path.
            PluginLoadError: its constructor failed.
            PluginFaultError: `export_state` or `import_state` failed.
            Exception: an error of the scheduler.
        """
        new, source, arguments = self._build(plugins)
        old = self.policy
        with contextlib.ExitStack() as undo:
            undo.callback(new.close)
            carried_over = self._carried_over(arguments, scheduler)
            if new.state_format and new.state_format == old.state_format:
                with _named(self._source, "export_state"):
                    state = old.export_state()
                with _named(source, "import_state"):
                    new.import_state(state)
            for request, plugin_args in carried_over:
                before = request.source.plugin_args, request.arguments, request.view
                undo.callback(_restore, request, *before)
                # The new policy gets a view of its own, which has the new arguments.
                request.source.plugin_args, request.view = plugin_args, None
            scheduler.set_policy(new)
            undo.pop_all()
        self._replaced[self._arguments.key] = self._arguments
        self._replaced.pop(arguments.key, None)
        self.policy, self._source, self._arguments = new, source, arguments
        try:
            old.close()
        except BaseException as cause:  # the new policy is in place all the same
            raise_unless_fault(cause)
            old.report("close() failed", cause)

    def close(self) -> None:
        """Close the policy."""
        self.policy.close()

    def _build(self, plugins: PluginSet) -> tuple[GuardedPolicy, Source, PolicyArguments]:
        entry = plugins.one(_KIND)
        policy = plugins.create(entry, PolicyContext)
        # The built-in ones are called per request and step: without a detour.
        calls = self._faults.calls(_KIND, entry.source) if is_third_party(entry) else None
        arguments = PolicyArguments(
            entry, plugins.target(entry), plugins.options(entry), self._vocab_size
        )
        reporter = self._faults.reporter(entry.source)
        return GuardedPolicy(policy, reporter, calls, arguments), entry.source, arguments

    def _carried_over(
        self, arguments: PolicyArguments, scheduler: Scheduler
    ) -> list[tuple[Request, dict[str, dict[str, Any]]]]:
        """Return the live requests, each with its `plugin_args` for a new policy."""
        if not (arguments.takes_any or self._arguments.takes_any):
            return []
        if not scheduler.num_unfinished_requests():
            return []
        try:
            live = list(scheduler.live_requests())
        except NotImplementedError as cause:
            raise ConfigError(
                f"{_CONFIG_PATH}: the arguments of live requests cannot be converted: {cause}"
            ) from None
        known = {self._arguments.key: self._arguments}
        result = []
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
    view: RequestView | None,
) -> None:
    request.source.plugin_args, request.arguments, request.view = plugin_args, arguments, view


@contextlib.contextmanager
def _named(source: Source, method: str) -> Iterator[None]:
    """Raise errors of a plugin's method as a PluginFaultError that names both."""
    try:
        yield
    except BaseException as cause:
        raise_unless_fault(cause)
        message = f"{source}: {method}() failed: {describe(cause)}"
        raise PluginFaultError(message) from cause


def change_policy(
    config: EngineConfig,
    config_sources: ConfigSources,
    plugins: PluginSet,
    use: str | type[SchedulingPolicy],
    options: Mapping[str, Any],
) -> tuple[EngineConfig, PluginSet]:
    """Return the configuration with another policy, and the next generation of the plugin set.

    Args:
        config, config_sources, plugins: the current ones; they are not changed.
        use: entry-point name, FQCN or class.
        options: the policy's own.

    Raises:
        ConfigError, PluginError: the policy or one of its options is wrong.
    """
    use = convert(with_references(use, _CONFIG_PATH, _ORIGIN), str, path=_CONFIG_PATH)
    options = convert(options, dict[str, Any], path="options")
    old = plugins.one(_KIND).name
    tables = {k: v for k, v in config.plugin.items() if k not in (old, f"{_KIND}/{old}")}
    origins = {**config_sources.by_path, _CONFIG_PATH: _ORIGIN}
    scheduler = msgspec.structs.replace(config.scheduler, policy=use)
    config = msgspec.structs.replace(config, scheduler=scheduler, plugin=tables)
    if options:
        table = _option_table(config, ConfigSources(origins), plugins)
        path = f"plugin.{table}"
        origins = {k: v for k, v in origins.items() if not f"{k}.".startswith(f"{path}.")}
        origins[path] = _ORIGIN
        config = msgspec.structs.replace(config, plugin={**tables, table: dict(options)})
    return config, plugins.changed(config, ConfigSources(origins), _KIND)


def _option_table(config: EngineConfig, config_sources: ConfigSources, plugins: PluginSet) -> str:
    """Return the key, in `EngineConfig.plugin`, of the options of the policy in `config`."""
    selection = Selection(config, config_sources, plugins.found)
    (chosen,) = selection.chosen(KINDS[_KIND], _CONFIG_PATH)
    others = (entry.name for entry in plugins.manifest.entries if entry.kind != _KIND)
    return f"{_KIND}/{chosen.name}" if chosen.name in others else chosen.name
