"""Definitions of a program's `__main__` arrive in another process as they were."""

from __future__ import annotations

import enum
import functools
import json
import pickle
import subprocess
import sys
from typing import Annotated, Any, Generic, Literal, TypeVar

import cloudpickle
import msgspec
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from msgspec import Meta
from support.searching import examples

from hardpoint import plugins
from hardpoint.errors import PluginLoadError
from hardpoint.host.registry.adapt import load_component
from hardpoint.host.registry.kinds import KINDS
from hardpoint.plugins.component import Source
from hardpoint.process.child_processes.main_module.main_pickle import dumps, loads
from hardpoint.process.child_processes.main_module.struct_pickle import StructParts
from hardpoint.typed import convert, json_schema

PROGRAM = '''
from __future__ import annotations
import dataclasses, enum, json, sys
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NewType
from typing import Required, TypedDict, TypeVar
import cloudpickle, msgspec
from msgspec import Meta
from hardpoint import plugins
from hardpoint.plugins import ConfigError, LogitsProcessor, Phase
from hardpoint.typed import convert

SCALE = 3
Positive = Annotated[int, Meta(gt=0)]
UserId = NewType("UserId", Positive)
T = TypeVar("T")

class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"

    def words(self):
        return f"{self.value} mode"

class Range(plugins.Arguments):
    """From here to there."""
    low: Annotated[int, Meta(ge=1, le=4, description="The lower end.", examples=[2])] = 2
    high: Positive = 9

@dataclasses.dataclass(frozen=True)
class Point:
    x: Positive
    y: int = dataclasses.field(default=3)

class Pair(NamedTuple):
    left: Positive
    right: int = 2

class Table(TypedDict, total=False):
    rows: Required[Positive]
    name: str

class Box(msgspec.Struct, Generic[T]):
    item: T

class Node(msgspec.Struct):
    NAME: ClassVar[str] = "node"
    size: Positive
    children: list[Node] = []
    name: str = msgspec.field(default_factory=lambda: Node.NAME)
    parent: Node | None = None

    def __post_init__(self):
        self.size += 1

    def total(self):
        return self.size + sum(child.total() for child in self.children)

class Base(LogitsProcessor):
    def greeting(self):
        return "base"

def penalty():
    table = {"x": (1, 2)}
    return lambda key: table[key]

class Dry(Base):
    """Don't repeat yourself."""
    contract = 1
    phase = Phase.PENALTY
    argmax_invariant = False
    TABLE = {"a": [1, 2]}
    look_up = staticmethod(penalty())

    class Options(plugins.Options):
        ngram: Positive = 2

    class Arguments(plugins.Arguments):
        """How much to repeat."""
        base: Annotated[float, Meta(gt=0, le=1)]
        span: Range = Range()
        mode: Mode = Mode.FAST
        kind: Literal["soft", "hard"] = "soft"
        stop: Annotated[str, Meta(min_length=2, pattern="^a")] | None = None
        sizes: list[Positive] = []
        limits: dict[str, Annotated[int, Meta(lt=10)]] = {}
        point: Point = Point(1)
        pair: Pair = Pair(1)
        table: Table | None = None
        user: UserId = 1
        node: Node | None = None
        box: Box[int] | None = None

        def scaled(self):
            return self.base * SCALE

    def greeting(self):
        return super().greeting() + "+dry"

    def apply(self, logits, rows):
        return logits * SCALE, self.Arguments, Range

VALUES = [
    {"base": 0.5}, {"base": 2}, {"base": 0}, {"base": "x"}, {}, {"base": 1, "bse": 1},
    {"base": 1, "span": {"low": 5}}, {"base": 1, "span": {"lo": 1}},
    {"base": 1, "mode": "slow"}, {"base": 1, "mode": "idle"}, {"base": 1, "kind": "mild"},
    {"base": 1, "stop": "b"}, {"base": 1, "stop": "ba"}, {"base": 1, "stop": "ab"},
    {"base": 1, "sizes": [1, 0]}, {"base": 1, "limits": {"k": 10}}, {"base": 1, "limits": {"k": 1}},
    {"base": 1, "point": {"x": 0}}, {"base": 1, "point": {"x": 2}}, {"base": 1, "pair": [0]},
    {"base": 1, "table": {"name": "n"}}, {"base": 1, "table": {"rows": 0}}, {"base": 1, "user": 0},
    {"base": 1, "node": {"size": 1, "children": [{"size": 0}]}},
    {"base": 1, "node": {"size": 1, "children": [{"size": 4}]}}, {"base": 1, "box": {"item": "i"}},
]

def answers(arguments):
    """What becomes of each value: the arguments in words, or the error's words."""
    found = []
    for value in VALUES:
        try:
            found.append(repr(convert(value, arguments, path="plugin_args.dry")))
        except ConfigError as error:
            found.append(str(error))
    return found

if __name__ == "__main__":
    from hardpoint.process.child_processes.main_module.main_pickle import dumps
    found = answers(Dry.Arguments)  # msgspec now has its caches in these classes
    objects = {"Dry": Dry, "Same": Dry, "Arguments": Dry.Arguments, "Range": Range, "Node": Node,
               "answers": answers, "json": json, "encode": msgspec.json.encode}
    open(sys.argv[1], "wb").write(dumps(objects))
    open(sys.argv[1] + ".plain", "wb").write(cloudpickle.dumps(Node))
    print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The program's output, the bytes it sent, and the bytes of cloudpickle alone."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(folder / "sent")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, (folder / "sent").read_bytes(), (folder / "sent.plain").read_bytes()


@pytest.fixture(scope="module")
def arrived(sent) -> dict[str, Any]:
    return loads(sent[1])


def test_constraints_refuse_in_the_same_words(sent, arrived):
    here = arrived["answers"](arrived["Arguments"])
    assert here == json.loads(sent[0])
    assert sum(answer.startswith("plugin_args.dry") for answer in here) == 20
    assert here[1] == "plugin_args.dry.base: expected a number <= 1, got 2"
    assert here[6] == "plugin_args.dry.span.low: expected a whole number <= 4, got 5"


def test_arrives_again_from_there(sent, arrived):
    again = loads(dumps({"Arguments": arrived["Arguments"], "answers": arrived["answers"]}))
    assert again["answers"](again["Arguments"]) == json.loads(sent[0])


def test_identity_is_kept(arrived):
    dry = arrived["Dry"]
    assert arrived["Same"] is dry
    assert arrived["Arguments"] is dry.Arguments
    _, arguments, range_ = dry.apply(object.__new__(dry), 1, None)
    assert arguments is dry.Arguments
    assert range_ is arrived["Range"]
    assert type(convert({"base": 1}, dry.Arguments, path="").span) is arrived["Range"]
    assert arrived["Node"](1).children is not arrived["Node"](1).children


def test_what_a_class_has_arrives(arrived):
    dry = arrived["Dry"]
    assert (dry.__module__, dry.__qualname__) == ("__main__", "Dry")
    assert (dry.Arguments.__module__, dry.Arguments.__qualname__) == ("__main__", "Dry.Arguments")
    assert dry.__doc__ == "Don't repeat yourself."
    assert dry.Arguments.__doc__ == "How much to repeat."
    assert dry.TABLE == {"a": [1, 2]}
    assert dry.look_up("x") == (1, 2)
    assert object.__new__(dry).greeting() == "base+dry"
    assert dry.Arguments(base=2).scaled() == 6
    assert dry.Arguments(base=1).mode.words() == "fast mode"
    assert issubclass(dry.Arguments, plugins.Arguments)
    with pytest.raises(AttributeError, match="immutable"):
        dry.Arguments(base=1).base = 2
    with pytest.raises(TypeError, match="positional"):
        dry.Arguments(1)


def test_descriptions_arrive(arrived):
    low = json_schema(arrived["Range"])["$defs"]["Range"]["properties"]["low"]
    assert low == {
        "type": "integer", "minimum": 1, "maximum": 4, "default": 2,
        "description": "The lower end.", "examples": [2],
    }  # fmt: skip


def test_struct_that_refers_to_itself(arrived):
    node = arrived["Node"]
    tree = msgspec.convert({"size": 1, "children": [{"size": 2}]}, node)
    assert tree.total() == 5
    assert tree.children[0].name == node.NAME == "node"
    assert tree.parent is None


def test_it_is_a_component_where_it_arrives(arrived):
    source = Source("dry", "__main__:Dry", "no distribution", "unversioned", "default")
    dry = load_component(KINDS["logits_processors"], source, arrived["Dry"])
    assert dry is arrived["Dry"]
    assert dry.Options().ngram == 2


class Base:
    contract = 1
    scale = 2.5


def test_what_a_class_repeats_of_its_base_stays_its_own():
    """A plugin that is derived from another states its contract version in its own body."""
    derived = type("Derived", (Base,), {"contract": 1, "__module__": "__main__", "width": 3})
    arrived = loads(dumps(derived))
    assert vars(arrived)["contract"] == 1
    assert "scale" not in vars(arrived)
    assert (arrived.scale, arrived.width) == (2.5, 3)


def test_importable_things_go_by_reference(arrived):
    assert arrived["json"] is json
    assert arrived["encode"] is msgspec.json.encode
    assert loads(dumps(plugins.Arguments)) is plugins.Arguments
    assert loads(dumps(plugins.EngineConfig)) is plugins.EngineConfig
    assert len(dumps(plugins.EngineConfig)) < 100


def test_why_cloudpickle_alone_will_not_do(sent, arrived):
    assert pickle.loads(sent[2]).__struct_fields__ == ()
    assert arrived["Node"].__struct_fields__ == ("size", "children", "name", "parent")
    with pytest.raises(TypeError, match="cannot pickle 'msgspec.*Meta"):
        cloudpickle.dumps(Meta(gt=0))


META = [
    Meta(gt=1, lt=2.5),
    Meta(ge=1, le=2, multiple_of=0.5),
    Meta(pattern="^x", min_length=1, max_length=3),
    Meta(tz=False),
    Meta(tz=True, title="t", description="d", examples=[1, "x"]),
    Meta(extra_json_schema={"a": [1]}, extra={"b": 2}),
    Meta(),
]


@pytest.mark.parametrize("meta", META, ids=repr)
def test_meta(meta):
    assert loads(dumps(meta)) == meta


# Any struct


class Colour(enum.Enum):
    RED = "red"


TYPES = st.sampled_from(
    [
        (int, [1, -1, "x"], 3),
        (Annotated[int, Meta(gt=0)], [1, 0], 3),
        (Annotated[str, Meta(min_length=2)], ["ab", "a", 1], "zz"),
        (list[Annotated[int, Meta(le=5)]], [[1], [6], 1], []),
        (dict[str, Annotated[float, Meta(lt=1)]], [{"a": 0.5}, {"a": 2}], {}),
        (Colour, ["red", "blue"], Colour.RED),
        (Literal["a", 1], ["a", 2], "a"),
        (Annotated[int, Meta(ge=0)] | None, [None, 1, -1], None),
        (tuple[int, str], [(1, "a"), (1, 2)], (1, "a")),
        (Any, [1, None], "any"),
    ]
)
FLAGS = ("frozen", "order", "array_like", "omit_defaults", "repr_omit_defaults",
         "forbid_unknown_fields", "weakref", "kw_only")  # fmt: skip
CONFIG = st.fixed_dictionaries(
    {},
    optional={flag: st.booleans() for flag in FLAGS}
    | {
        "eq": st.just(True),
        "gc": st.booleans(),
        "tag": st.sampled_from([None, False, True, "t", 7]),
        "rename": st.sampled_from([None, "camel", "pascal", {"f_0": "zero"}]),
    },
)
PRESENCE = st.sampled_from(["required", "default", "factory", "renamed"])


@st.composite
def structs(draw, base=msgspec.Struct, first=0):
    """A class as a program would define it, and values for its fields."""
    config = draw(CONFIG)
    if base is not msgspec.Struct:  # these two must go with the base
        config = {k: v for k, v in config.items() if k not in ("frozen", "array_like", "order")}
        config["kw_only"] = True
    specs, values, seen_default = [], {}, False
    for index in range(first, first + draw(st.integers(0, 4))):
        type_, choices, default = draw(TYPES)
        presence = draw(PRESENCE)
        field, name = {}, f"f_{index}"
        if presence == "renamed":
            field["name"] = f"other{index}"
        if presence == "factory":
            field["default_factory"] = (
                functools.partial(type(default), default)
                if isinstance(default, (int, str, list, dict, tuple))
                else (lambda value=default: value)
            )
        elif presence == "default" or (seen_default and not config.get("kw_only")):
            field["default"] = default
        seen_default = seen_default or "default" in field or "default_factory" in field
        specs.append((name, type_, msgspec.field(**field)))
        values[name] = draw(st.sampled_from(choices))
    try:
        made = msgspec.defstruct(
            "Made",
            specs,
            bases=(base,),
            module="__main__",
            namespace={"CONSTANT": [1]},
            **config,
        )
    except ValueError:  # options that do not go together
        reject()
    return made, values


@st.composite
def families(draw):
    base, values = draw(structs())
    if not draw(st.booleans()):
        return base, values
    made, more = draw(structs(base, len(values)))
    return made, values | more


def outcome(cls, values):
    names = dict(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    table = {names[name]: value for name, value in values.items()}
    if tag := cls.__struct_config__.tag:
        table[cls.__struct_config__.tag_field] = tag
    message = table
    if cls.__struct_config__.array_like:
        message = [tag] if tag else []
        message += [table[name] for name in cls.__struct_encode_fields__]
    try:
        made = msgspec.convert(message, cls)
    except msgspec.ValidationError as error:
        return str(error)
    # omit_defaults compares by identity, which a copied default does not have
    whole = msgspec.structs.asdict(made) if cls.__struct_config__.omit_defaults else made
    return sorted(msgspec.structs.asdict(made).items(), key=str), msgspec.json.encode(whole)


@examples(300)
@given(families())
def test_any_struct_behaves_as_the_original(family):
    cls, values = family
    copy = loads(dumps({"cls": cls}))["cls"]
    assert copy is not cls
    assert outcome(copy, values) == outcome(cls, values)
    assert copy.__match_args__ == cls.__match_args__
    assert copy.CONSTANT == [1]
    for name in dir(cls.__struct_config__):
        if not name.startswith("_"):
            config = getattr(copy.__struct_config__, name)
            assert config == getattr(cls.__struct_config__, name), name
    for ours, theirs in zip(msgspec.structs.fields(copy), msgspec.structs.fields(cls), strict=True):
        assert (ours.name, ours.encode_name, ours.type) == (
            theirs.name, theirs.encode_name, theirs.type
        )  # fmt: skip
        assert ours.default == theirs.default


T = TypeVar("T")


def test_generic_struct_and_its_specialisation():
    class Box(msgspec.Struct, Generic[T]):
        item: T

    class Numbers(Box[Annotated[int, Meta(gt=0)]]):
        pass

    box, numbers = loads(dumps((Box, Numbers)))
    assert issubclass(numbers, box)
    for cls in (numbers, box[Annotated[int, Meta(gt=0)]]):
        with pytest.raises(msgspec.ValidationError, match="Expected `int` >= 1"):
            msgspec.convert({"item": 0}, cls)


def test_post_init_and_super():
    class First(msgspec.Struct):
        x: int

        def __post_init__(self):
            self.x += 1

    class Second(First, tag="two"):
        def __post_init__(self):
            super().__post_init__()
            self.x *= 10

    class Third(Second):
        y: int = 0

    first, second, third = loads(dumps((First, Second, Third)))
    assert [cls(1).x for cls in (first, second, third)] == [2, 20, 20]
    assert msgspec.convert({"x": 1, "type": "two"}, second).x == 20


def test_struct_instance():
    class Setting(msgspec.Struct, frozen=True):
        x: int
        rest: dict[str, int] = {}

    copy, cls = loads(dumps((Setting(3, {"a": 1}), Setting)))
    assert type(copy) is cls
    assert (copy.x, copy.rest) == (3, {"a": 1})


def test_an_unknown_module_is_named():
    data = pickle.dumps(json.JSONDecoder).replace(b"json", b"jsno")
    with pytest.raises(PluginLoadError, match=r"cannot be rebuilt .*No module named 'jsno"):
        loads(data)


def test_parts_have_no_types_before_they_are_filled():
    class Loop(msgspec.Struct):
        x: int

    parts = StructParts.of(Loop)
    assert parts.layout[2] == {
        "x": {"name": "x", "default": msgspec.NODEFAULT, "default_factory": msgspec.NODEFAULT}
    }
    assert parts.content[0] == {"x": int}
