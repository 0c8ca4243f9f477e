"""Component adapters with one mistake each, and right ones."""

import contextlib
import sys
from types import ModuleType

from hardpoint import plugins
from hardpoint.errors import PluginContractError
from hardpoint.plugins import AdaptedComponent, ComponentAdapter, LogitsProcessor, Phase
from support.samples import Sample

MODULE = "acme_engine_that_is_missing"


class Bias:
    """A foreign class."""

    def bias(self, logits):
        return logits


class NearMiss:
    """A foreign class that lacks the method."""

    bias = None


class RunsBias(AdaptedComponent, LogitsProcessor):
    contract = 1
    adapter = "class with bias"
    phase = Phase.BIAS

    def apply(self, logits, rows):
        return self.target().bias(logits)


class Right(Sample, ComponentAdapter, contract=1):
    """Right: adapts classes with a method `bias`, and has a stand-in."""

    @classmethod
    def matches(cls, target, kind):
        return isinstance(target, type) and hasattr(target, "bias")

    @classmethod
    def adapt(cls, target, source):
        if not callable(target.bias):
            raise PluginContractError(f"{source}: its bias must be a method")
        return type(target.__name__, (RunsBias,), {"contract": 1, "target": target})

    @classmethod
    def stand_ins(cls, module):
        return cls.standing_in() if module == MODULE else None

    @classmethod
    @contextlib.contextmanager
    def standing_in(cls):
        sys.modules[MODULE] = ModuleType(MODULE)
        try:
            yield
        finally:
            del sys.modules[MODULE]


class Bare(Right):
    """Right: has no stand-ins of its own."""

    @classmethod
    def stand_ins(cls, module):
        return super().stand_ins(module)


class NoContract(Right, contract=None):
    pass


class WithOptions(Right):
    class Options(plugins.Options):
        strict: bool = True


class MatchesNothing(Right):
    @classmethod
    def matches(cls, target, kind):
        return False


class MatchesAll(Right):
    @classmethod
    def matches(cls, target, kind):
        return True


class Truthy(Right):
    @classmethod
    def matches(cls, target, kind):
        return "bias" if super().matches(target, kind) else False


class Raises(Right):
    @classmethod
    def matches(cls, target, kind):
        return issubclass(target, Bias | NearMiss)


class Unmarked(Right):
    """Returns a component that is no adapted one."""

    @classmethod
    def adapt(cls, target, source):
        super().adapt(target, source)
        return type("Unmarked", (LogitsProcessor,), {"contract": 1, "apply": target.bias})


class Abstract(Right):
    """Returns a class that lacks a method of its kind."""

    @classmethod
    def adapt(cls, target, source):
        super().adapt(target, source)
        members = {"contract": 1, "adapter": "half", "phase": Phase.BIAS}
        return type("Half", (AdaptedComponent, LogitsProcessor), members)


class Counts(Right):
    """Makes another component at each call."""

    calls = 0

    @classmethod
    def adapt(cls, target, source):
        adapted = super().adapt(target, source)
        Counts.calls += 1
        adapted.number = Counts.calls
        return adapted


class Marks(Right):
    """Changes the object."""

    @classmethod
    def adapt(cls, target, source):
        adapted = super().adapt(target, source)
        Marks.number = getattr(Marks, "number", 0) + 1
        setattr(target, f"mark_{Marks.number}", True)
        return adapted


class Anonymous(Right):
    @classmethod
    def adapt(cls, target, source):
        if not callable(target.bias):
            raise PluginContractError("its bias must be a method")
        return super().adapt(target, source)


class Accepts(Right):
    @classmethod
    def adapt(cls, target, source):
        return type(target.__name__, (RunsBias,), {"contract": 1, "target": target})


class Leaves(Right):
    @classmethod
    @contextlib.contextmanager
    def standing_in(cls):
        sys.modules[MODULE] = ModuleType(MODULE)
        yield
        del sys.modules[MODULE]


class Hides(Right):
    @classmethod
    @contextlib.contextmanager
    def standing_in(cls):
        with contextlib.suppress(KeyError):
            yield


class ForAll(Right):
    @classmethod
    def stand_ins(cls, module):
        return cls.standing_in()
