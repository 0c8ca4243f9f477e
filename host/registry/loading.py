"""Imports a component and checks that it keeps its kind's contract."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, get_args
from weakref import WeakKeyDictionary

from hardpoint import typed
from hardpoint.errors import (
    HardpointError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
)
from hardpoint.plugins.component import Component, ComponentAdapter, Source
from hardpoint.plugins.component.base import NoOptions
from hardpoint.plugins.component.wrapper import Wrapper
from hardpoint.plugins.output_parser import OutputParser, Role
from hardpoint.plugins.params import SamplingParams
from hardpoint.plugins.sampling.logits import BatchLogitsProcessor, LogitsPlugin
from hardpoint.plugins.sampling.states import RequestStates, takes_distribution
from hardpoint.plugins.server.hooks import hookimpl
from hardpoint.plugins.text.arguments import ComponentWithArguments

from .adapters.external_packages import module_hint
from .blame import faults_as
from .kinds import KINDS, PluginKind
from .request_arguments import check_arguments

_EXAMPLES = {
    "phase": "Phase.TRUNCATE",
    "devices": '("cpu",)',
    "roles": '("reasoning",)',
}
"""A value of each class attribute that an interface declares without one."""

StandIns = Callable[[str], contextlib.AbstractContextManager[None] | None]

_OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_PLAIN = {bool: "True or False", int: "a whole number", str: "a string"}

_CONTRACT = ("hardpoint.plugins", "hardpoint.toolkit")
"""Modules that define what components derive from, as prefixes."""

_SIGNATURES: WeakKeyDictionary[FunctionType, inspect.Signature] = WeakKeyDictionary()
_METHODS: WeakKeyDictionary[FunctionType, set[tuple[str, type, Any]]] = WeakKeyDictionary()
"""Of functions that were checked before, since each engine of a program checks the same classes:
their signatures, and as what they were found right: name, type of the member, what is expected."""


@contextlib.contextmanager
def inspecting(source: Source) -> Iterator[None]:
    """Name the plugin in errors of its own code while the loader inspects it.

    Raises:
        PluginContractError: its metaclass, a descriptor or its module failed; the cause is chained.
    """
    message = f"{source}: looking at it"
    with faults_as(PluginContractError, message, passing=(HardpointError,)):
        yield


@contextlib.contextmanager
def keeping_torch(source: Source, method: str, kind: str = "") -> Iterator[None]:
    """Put torch's settings back where the body, which runs code of a plugin, changes them.

    Args:
        source: names the plugin.
        method: runs.
        kind: kind of the plugin; an executor opens workers, which set the number of threads.
    """
    if kind == "executors":
        yield
        return
    if "torch" in sys.modules:
        from hardpoint.host.system import torch_state  # noqa: PLC0415 - needs torch

        with torch_state.kept(source, method):
            yield
        return
    try:
        yield
    finally:
        if "torch" in sys.modules:  # imported by the plugin
            from hardpoint.host.system import torch_state  # noqa: PLC0415

            torch_state.put_back_defaults(source, method)


def import_object(source: Source, stand_ins: StandIns = lambda _module: None) -> Any:
    """Import the object of `source.value`.

    Args:
        stand_ins: returns a context in which code that lacks a module can be imported, or None.

    Raises:
        PluginLoadError: the module fails to import; the cause is chained.
        PluginNotFoundError: the module has no such attribute.
    """
    module_name = source.value.partition(":")[0]
    with faults_as(PluginLoadError, f"{source}: its import", passing=(PluginNotFoundError,)):
        try:
            is_new = module_name not in sys.modules
            with keeping_torch(source, "import") if is_new else contextlib.nullcontext():
                target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as cause:
            if cause.name and (context := stand_ins(cause.name)) is not None:
                with context:
                    return _attribute(source, importlib.import_module(module_name))
            if cause.name and f"{module_name}.".startswith(f"{cause.name}."):
                missing = f"{source}: there is no module {cause.name!r}"
                raise PluginNotFoundError(missing) from cause
            if hint := module_hint(cause.name):
                raise ModuleNotFoundError(f"{cause}{hint}", name=cause.name) from cause
            raise
    return _attribute(source, target)


def _attribute(source: Source, target: Any) -> Any:
    module_name, _, qualname = source.value.partition(":")
    with inspecting(source):
        for part in qualname.split(".") if qualname else ():
            if not hasattr(target, part):
                raise PluginNotFoundError(f"{source}: {module_name!r} has no {qualname!r}")
            target = getattr(target, part)
    return target


def kinds_of(target: Any, source: Source, hint: str = "") -> list[PluginKind]:
    """Return the kinds of an imported object: one, or the roles of an output parser.

    Args:
        hint: ends the message about an object that is no plugin.

    Raises:
        PluginContractError: it derives from no interface and marks no hook.
    """
    if inspect.isclass(target):
        roles = getattr(target, "roles", ())
        kinds = [k for k in KINDS.values() if k.interface and issubclass(target, k.interface)]
        if kinds and kinds[0].role is None:
            return kinds[:1]
        if kinds:  # one without roles is refused when it is checked
            return [kind for kind in kinds if kind.role in roles] or kinds[:1]
    if marks_hooks(target):
        return [KINDS["hooks"]]
    raise PluginContractError(
        f"{source}: it is no plugin: it derives from no interface of hardpoint.plugins "
        f"and marks no function with hookimpl{hint}"
    )


def check_component(target: Any, kind: PluginKind, source: Source, hint: str = "") -> None:
    """Check that an imported object keeps its kind's contract.

    Args:
        hint: ends the message about an object that does not derive from the kind's interface.

    Raises:
        PluginContractError: it does not; the message names the fault and the fix.
    """
    if kind.interface is None:
        if not marks_hooks(target):
            raise PluginContractError(f"{source}: it marks no function with hookimpl")
        _check_hook_options(target, source)
    else:
        _check_class(target, kind, source, hint)
    _check_version(target, kind, source)


def marks_hooks(target: Any) -> bool:
    """Return whether an object has a function marked with `hookimpl`."""
    return bool(hook_functions(target))


def takes_context(cls: type) -> bool:
    """Return whether the constructor of a class of hooks takes a `HookContext`."""
    parameters = list(inspect.signature(cls).parameters.values())[:1]
    return any(item.default is item.empty and item.kind not in _OPEN_ENDED for item in parameters)


def hook_functions(target: Any) -> dict[str, str]:
    """Return the names of an object's functions that are marked with `hookimpl`, by hook."""
    is_class, members = inspect.isclass(target), dict[str, Any]()  # no descriptor is run
    for cls in reversed(inspect.getmro(target if is_class else type(target))[:-1]):
        members |= vars(cls)
    if not is_class:
        members |= getattr(target, "__dict__", {})
    by_hook: dict[str, str] = {}
    for name, member in members.items():
        function = getattr(member, "__func__", member)
        marks = getattr(function, f"{hookimpl.project_name}_impl", None)
        if isinstance(marks, dict):
            by_hook[marks["specname"] or name] = name
    return by_hook


def snake_case(name: str) -> str:
    """Return `DryPenalty` as `dry_penalty`."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


def _check_hook_options(target: Any, source: Source) -> None:
    declared = getattr(target, "Options", None)
    if declared is None or not inspect.isclass(target):
        return
    _check_options(declared, typed.Options, source)
    if not takes_context(target):
        raise PluginContractError(
            f"{source}: it has Options and its constructor takes no context; write "
            f"`def __init__(self, context)`, where context.options holds them"
        )


def _check_options(declared: Any, base: type, source: Source, attribute: str = "Options") -> None:
    if not (inspect.isclass(declared) and issubclass(declared, base)):
        raise PluginContractError(
            f"{source}: its {attribute} must derive from hardpoint.plugins.{base.__qualname__}"
        )


def _check_class(target: Any, kind: PluginKind, source: Source, hint: str) -> None:
    assert kind.interface is not None
    wanted = " or ".join(kind.interface_names)
    if not inspect.isclass(target) or not issubclass(target, kind.interface):
        raise PluginContractError(
            f"{source}: {kind.name} must be classes derived from hardpoint.plugins {wanted}, "
            f"this is {_describe(target)}{hint}"
        )
    if kind.forms and not issubclass(target, kind.forms):
        raise PluginContractError(f"{source}: it must derive from {wanted}")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{source}: it lacks {', '.join(missing)}")
    _check_types(target, source)
    _check_members(target, source)
    _check_attributes(target, source)
    if issubclass(target, LogitsPlugin):
        _check_logits_plugin(target, source)
    elif issubclass(target, RequestStates):
        _check_states(target, source)
    if issubclass(target, OutputParser):
        _check_roles(target, kind, source)


def _check_roles(target: type[OutputParser], kind: PluginKind, source: Source) -> None:
    known = get_args(Role)
    if not target.roles or not set(target.roles) <= set(known):
        raise PluginContractError(
            f"{source}: its roles must be some of {', '.join(known)}, got {target.roles!r}"
        )
    if kind.role not in target.roles:
        raise PluginContractError(
            f"{source}: as one of {kind.name} it needs {kind.role!r} among its roles, "
            f"got {target.roles!r}"
        )


def _check_logits_plugin(target: type[LogitsPlugin], source: Source) -> None:
    _check_states(target, source)
    for field in target.params_fields:
        if field not in SamplingParams.__struct_fields__:
            raise PluginContractError(
                f"{source}: its params_fields name {field!r}, which SamplingParams does not have"
            )


def _check_states(target: type[RequestStates], source: Source) -> None:
    if issubclass(target, Wrapper):
        return  # the wrapped component is checked
    _check_observe(target, source)
    if target.advance is not LogitsPlugin.advance and target.start is LogitsPlugin.start:
        raise PluginContractError(
            f"{source}: it has advance but no start, so there is no state to carry on; add start"
        )


def _check_observe(target: type[RequestStates], source: Source) -> None:
    state = target.State
    is_declared = inspect.isclass(state) and issubclass(state, (typed.State, bytes))
    if target.observe is LogitsPlugin.observe:
        if state is not typed.State or target.max_state_bytes:
            raise PluginContractError(
                f"{source}: it declares State or max_state_bytes but has no observe, for which "
                f"they are; add observe, or remove them"
            )
        return
    if issubclass(target, BatchLogitsProcessor):
        raise PluginContractError(
            f"{source}: it has observe, which the batch form does not have; derive from "
            f"LogitsProcessor or SparseLogitsProcessor"
        )
    if target.start is LogitsPlugin.start or target.advance is not LogitsPlugin.advance:
        raise PluginContractError(
            f"{source}: it has observe, so it needs start for the first state, and no advance"
        )
    if not is_declared or state is typed.State:
        raise PluginContractError(
            f"{source}: it has observe, so its State must be declared: "
            f"`class State(hardpoint.plugins.State)` with its fields, or `State = bytes`"
        )
    if type(target.max_state_bytes) is not int or target.max_state_bytes < 1:
        raise PluginContractError(
            f"{source}: it has observe, so its max_state_bytes must be an int >= 1, "
            f"got {target.max_state_bytes!r}"
        )
    if takes_distribution(target) and target.supports_resume:
        raise PluginContractError(
            f"{source}: its observe takes the distribution; expected supports_resume = False"
        )


def _check_types(target: type[Component], source: Source) -> None:
    options = Wrapper.Options if issubclass(target, Wrapper) else typed.Options
    for attribute, base in (("Options", options), ("Arguments", typed.Arguments)):
        _check_options(getattr(target, attribute, base), base, source, attribute)
    if issubclass(target, ComponentAdapter) and target.Options is not NoOptions:
        raise PluginContractError(
            f"{source}: it has Options, but a component adapter has none; declare them in the "
            f"class that its adapt returns"
        )
    if issubclass(target, ComponentWithArguments):
        check_arguments(target, source)
    elif hasattr(target, "Arguments"):
        raise PluginContractError(
            f"{source}: it has Arguments, but requests give none to a component of its kind; "
            f"expected Options"
        )


def _check_members(target: type[Component], source: Source) -> None:
    """Check the contract's rules for members that Python does not: no `async`, true bools."""
    contract = tuple(base for base in target.__mro__ if base.__module__.startswith(_CONTRACT))
    expected = _members_of(contract)
    bases = [base for base in target.__mro__ if base not in contract]
    for name, member in [
        item for base in bases for item in vars(base).items() if item[0] in expected
    ]:
        if isinstance(member, functools.partialmethod):
            member = member.__get__(None, target)  # the function that it makes
        function, wanted = getattr(member, "__func__", member), expected[name]
        if not (inspect.isfunction(function) and isinstance(wanted, FunctionType | classmethod)):
            _check_member(name, wanted, member, source)
        elif (place := (name, type(member), wanted)) not in _METHODS.get(function, ()):
            _check_member(name, wanted, member, source)
            _METHODS.setdefault(function, set()).add(place)


@functools.cache
def _members_of(contract: tuple[type, ...]) -> dict[str, Any]:
    return {name: member for base in reversed(contract) for name, member in vars(base).items()}


def _check_member(name: str, expected: Any, member: Any, source: Source) -> None:
    function = getattr(member, "__func__", member)
    if callable(function) and _is_async(function):
        raise PluginContractError(
            f"{source}: its {name} is async, which nothing awaits; expected a plain method "
            f"(def {name})"
        )
    if inspect.isfunction(expected) and not name.startswith("_") and not callable(function):
        raise PluginContractError(f"{source}: its {name} must be a method, got {member!r}")
    if isinstance(expected, property) and inspect.isfunction(function):
        raise PluginContractError(
            f"{source}: its {name} is a method; write @property above its def"
        )
    _check_call(name, expected, member, source)
    if isinstance(expected, bool) and not isinstance(member, bool):
        raise PluginContractError(f"{source}: its {name} must be True or False, got {member!r}")


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _check_call(name: str, expected: Any, member: Any, source: Source) -> None:
    if name.startswith("_") or not (inspect.isfunction(expected) or type(expected) is classmethod):
        return
    if isinstance(expected, classmethod) and not isinstance(member, classmethod | staticmethod):
        raise PluginContractError(
            f"{source}: its {name} is called on the class; write @classmethod above its def"
        )
    # Python binds no object that has no __get__, such as a partial or one with __call__.
    is_free = isinstance(member, staticmethod) or not hasattr(type(member), "__get__")
    bound = isinstance(expected, classmethod) or is_free
    wanted = _parameters(expected, bound=bound)
    taken = _parameters(member, bound=isinstance(member, classmethod))
    if wanted is None or taken is None:
        return
    if not _accepts(taken, wanted) and not _accepts(taken, wanted, all_=True):
        raise PluginContractError(
            f"{source}: its {name} takes {_text(taken)}, expected {_text(wanted)}"
        )


def _parameters(member: Any, *, bound: bool) -> inspect.Signature | None:
    function = getattr(member, "__func__", member)
    is_plain = inspect.isfunction(function)
    if (signature := _SIGNATURES.get(function) if is_plain else None) is None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return None
        if is_plain:
            _SIGNATURES[function] = signature
    return signature.replace(parameters=list(signature.parameters.values())[bound:])


def _accepts(taken: inspect.Signature, wanted: inspect.Signature, *, all_: bool = False) -> bool:
    parameters = [p for p in wanted.parameters.values() if all_ or p.default is p.empty]
    try:
        taken.bind(
            *(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
            **{p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError:
        return False
    return True


def _text(signature: inspect.Signature) -> str:
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))


def _check_attributes(target: type[Component], source: Source) -> None:
    for base in target.__mro__:
        if not base.__module__.startswith(_CONTRACT):
            continue
        for name, type_ in _declared_attributes(base).items():
            value = getattr(target, name, None)
            if not (expected := _wrong_type(value, type_)):
                continue
            message = f"{source}: its {name} must be {expected}, got {value!r}"
            if name in _EXAMPLES:
                message = (
                    f"{source}: it states no {name}; add `{name} = {_EXAMPLES[name]}` (or another) "
                    f"to the class"
                )
                if value is not None:
                    message += f": it must be {expected}, got {value!r}"
            raise PluginContractError(message)


@functools.cache
def _declared_attributes(base: type) -> dict[str, Any]:
    return {
        name: get_args(hint)[0]
        for name, hint in inspect.get_annotations(base, eval_str=True).items()
        if str(hint).startswith("typing.ClassVar") and name != "contract"
    }


def _wrong_type(value: Any, type_: Any) -> str:
    if type_ in _PLAIN:
        return "" if type(value) is type_ else _PLAIN[type_]
    if type_ == tuple[str, ...]:
        is_names = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
        return "" if is_names else "a tuple of names"
    if inspect.isclass(type_) and issubclass(type_, Enum):
        return "" if isinstance(value, type_) else f"one of hardpoint.plugins.{type_.__name__}"
    return ""


def _check_version(target: Any, kind: PluginKind, source: Source) -> None:
    place = "module" if isinstance(target, ModuleType) else "class body"
    attributes = vars(target) if hasattr(target, "__dict__") else {}
    if "contract" not in attributes and not inspect.isclass(target) and place == "class body":
        attributes = vars(type(target))
    if "contract" not in attributes:
        raise PluginContractError(
            f"{source}: it states no contract version; add `contract = {kind.contract}` "
            f"to its {place}"
        )
    stated = attributes["contract"]
    accepted = [v for v in (kind.contract - 1, kind.contract) if v > 0]
    if type(stated) is not int or stated not in accepted:
        raise PluginContractError(
            f"{source}: it was written for version {stated!r} of the {kind.name} contract; "
            f"this Hardpoint accepts {' and '.join(map(str, accepted))}"
        )


def _describe(target: Any) -> str:
    if inspect.isclass(target):
        bases = ", ".join(base.__name__ for base in target.__bases__)
        return f"a class derived from {bases}"
    return f"a {type(target).__name__}"
