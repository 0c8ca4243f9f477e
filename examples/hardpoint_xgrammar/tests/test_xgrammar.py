"""The grammar backend xgrammar: enforced and refused grammars, and the limits of compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from hardpoint_xgrammar import XGrammar, compile_program
from hardpoint_xgrammar.backend import check_grammar
from hardpoint_xgrammar.compile_program import Job, Start
from hardpoint_xgrammar.compiler import GrammarCompiler
from hardpoint_xgrammar.schemas import unenforced_keywords

from hardpoint import LLM, SamplingParams
from hardpoint.errors import HardpointError, PluginLoadError
from hardpoint.plugins.grammars import GrammarContext, Vocabulary
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_config, write_scripted_model

BYTES = tuple(bytes([byte]) for byte in range(256))
END, CALL, EMPTY, PAIR, CLOSE = range(256, 261)
VOCABULARY = Vocabulary((*BYTES, b"<eos>", b"<call>", b"", b'{"', b"</call>"), (END, CALL, CLOSE))
VOCAB_SIZE = 301
WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(scope="module")
def library():
    """Skip tests that need xgrammar where it is not installed."""
    pytest.importorskip("xgrammar")


def wait_until(condition, limit_s=60.0):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s
        time.sleep(0.005)


def open_backend(seconds: float = 60.0, vocabulary: Vocabulary = VOCABULARY, **options) -> XGrammar:
    return XGrammar(
        GrammarContext(
            name="xgrammar",
            options=XGrammar.Options(**options),
            vocabulary=vocabulary,
            vocab_size=VOCAB_SIZE,
            compile_seconds=seconds,
        )
    )


@pytest.fixture(scope="module")
def backend(library):
    made = open_backend()
    yield made
    made.close()


def compiled(backend: XGrammar, **fields):
    return backend.compile(StructuredOutputs.checked(fields))


def tag(backend: XGrammar, format):
    return compiled(backend, structural_tag={"type": "structural_tag", "format": format})


def ids(*parts: str | int) -> list[int]:
    return [id for part in parts for id in (part.encode() if isinstance(part, str) else [part])]


def allowed(state) -> list[int]:
    row = np.zeros(WORDS, np.int32)
    state.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def accepts(state, *parts: str | int) -> bool:
    """Return whether a grammar takes a text and has its tokens in its masks."""
    state = state.fork()
    for id in ids(*parts):
        in_mask = id in allowed(state)
        assert state.advance(id) == in_mask
        if not in_mask:
            return False
    return state.fill_bitmask(np.zeros(WORDS, np.int32))


NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "a+"}, "end": "</f>"}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"json": NUMBERS}, '{"a": 12}', '{"a": 0}'),
        ({"json": NUMBERS}, '{ "a" :12}', '{"a": 1, "b": 2}'),
        ({"json": True}, '["x", null]', '["x"'),
        ({"json": {"enum": ["x", 1]}}, "1", "2"),
        ({"json": {"type": "string", "enum": ["x"]}}, '"x"', '"y"'),
        ({"json": {"const": {"a": [1, {}]}}}, '{ "a": [1,  { }] }', '{"a": [1]}'),
        ({"json": {"const": {"a": [1, {}]}}}, '{"a":[1,{}]}', '{"a":[1,{},2]}'),
        ({"json": {"enum": [[], "x", {"k": None}]}}, '{"k" : null}', '{"k": 1}'),
        ({"json": {"enum": [[], "x", {"k": None}]}}, "[ ]", "[1]"),
        ({"json": {"enum": [[], "x", {"k": None}]}}, '"x"', '"y"'),
        ({"json": {"type": "string", "format": "password"}}, '"a b"', "1"),
        ({"json_object": True}, '{"a": [1, {}]}', "[1]"),
        ({"regex": "(a|bc)+"}, "abca", "abb"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, "((x))", "((x)"),
        ({"choice": ["yes", 'n"o', "<eos>"]}, 'n"o', "no"),
        ({"choice": ["yes", 'n"o', "<eos>"]}, "<eos>", "<eos"),
    ],
)
def test_each_format_allows_what_it_describes(backend, fields, right, wrong):
    state = compiled(backend, **fields)
    assert accepts(state, right)
    assert not accepts(state, wrong)


TEXT = {"type": "any_text"}
CALLED = {**TAG, "begin": "<call>f", "end": "x</call>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}
CALLS = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALLED]}
MIXED = {**TRIGGERED, "tags": [{**TAG, "begin": "<f><call>", "end": "</call></f>"}]}
WITH_SEPARATOR = {"type": "tags_with_separator", "tags": [TAG], "separator": ","}


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (TAG, [("<f>aa</f>",)], [("<f></f>",), ("aa",)]),
        (CALLED, [(CALL, "faax", CLOSE)], [("<call>fax</call>",), (CALL, "fa", CLOSE)]),
        ({**CALLED, "content": TEXT}, [(CALL, "f x yx", CLOSE)], [(CALL, "f", CALL, "x", CLOSE)]),
        ({**TAG, "content": TEXT}, [("<f>so</f>",)], [("<f>so</f>so</f>",), ("<f>", CALL, "</f>")]),
        ({"type": "token", "token": CALL}, [(CALL,)], [("<call>",), (END,)]),
        ({**TAG, "end": "</call>x"}, [("<f>aa", CLOSE, "x")], [("<f>aax",), ("<f>aa", CLOSE)]),
        (
            {**TAG, "content": TEXT, "end": "x</call>y<call>"},
            [("<f>xyxx", CLOSE, "y", CALL)],
            [("<f>xyxx", CLOSE, "x"), ("<f>xyxx", CLOSE, "y"), ("<f>", CALL)],
        ),
        (TEXT, [("é",), ()], [(CALL,), (END,)]),
        (TRIGGERED, [("so",), ("so <f>a</f> on <f>aa</f>",)], [("so <f>b",), ("so", CALL)]),
        ({**TRIGGERED, "at_least_one": True}, [("<f>a</f> on",)], [("so",)]),
        ({**TRIGGERED, "stop_after_first": True}, [("so <f>a</f>",)], [("so <f>a</f> on",)]),
        (
            MIXED,
            [("so <f>", CALL, "a", CLOSE, "</f> on")],
            [("so", CALL), ("<f>a",), ("<f><call>",)],
        ),
        (CALLS, [("so ", CALL, "fax", CLOSE, " on")], [(CALL, "so"), ("so", CLOSE), ("so", END)]),
        (WITH_SEPARATOR, [("<f>a</f>,<f>aa</f>",), ()], [("<f>a</f><f>a</f>",)]),
        (
            {**WITH_SEPARATOR, "separator": "<call>", "at_least_one": True},
            [("<f>a</f>",), ("<f>a</f>", CALL, "<f>a</f>")],
            [(), ("<f>a</f><call>",)],
        ),
        (
            {**WITH_SEPARATOR, "separator": "<call>", "stop_after_first": True},
            [(), ("<f>a</f>",)],
            [("<f>a</f>", CALL, "<f>a</f>")],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "a<call>b"},
                    {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "g"'}},
                    {"type": "star", "content": {"type": "json_schema", "json_schema": NUMBERS}},
                    {"type": "or", "elements": [{"type": "plus", "content": TAG}, TEXT]},
                ],
            },
            [("a", CALL, "b"), ("a", CALL, 'bg{"a": 1}{"a": 2}<f>a</f>')],
            [("a<call>b",), ("a", CALL, CALL)],
        ),
    ],
)
def test_structural_tags_match_special_tokens_by_id(backend, format, right, wrong):
    state = tag(backend, format)
    assert all(accepts(state, *parts) for parts in right)
    assert not any(accepts(state, *parts) for parts in wrong)


def test_no_mask_has_tokens_without_text_special_ones_or_those_beyond(backend):
    for state in (compiled(backend, regex="(.|\n)*"), tag(backend, TEXT), tag(backend, TRIGGERED)):
        assert PAIR in allowed(state)
        assert not {EMPTY, END, CALL, *range(len(VOCABULARY.tokens), WORDS * 32)} & {
            *allowed(state)
        }
        assert not any(state.advance(id) for id in (-1, EMPTY, END, CALL, VOCAB_SIZE, 10**6))


def test_a_state_goes_back_and_its_copies_go_on_by_themselves(backend):
    state = compiled(backend, regex="abcd")
    assert all(map(state.advance, ids("abc")))
    other = state.fork()
    state.rollback(2)
    assert allowed(state) == ids("b")
    assert other.advance(ord("d"))
    assert not state.advance(ord("d"))
    assert allowed(state) == ids("b")
    assert allowed(other) == []
    assert other.fill_bitmask(np.zeros(WORDS, np.int32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"not": {}}}, "^xgrammar does not enforce not$"),
        ({"json": {"type": "number", "multipleOf": 0.5}}, "all of it: multipleOf is not supported"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "oneOf with overlapping .* branches",
        ),
        ({"json": {"$ref": "https://example.com/x"}}, "URI should .* start with '#/'"),
        ({"json": {"type": "string", "pattern": "a", "minLength": 3}}, "ignoring minLength"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "minimum greater than maximum"),
        ({"json": {"type": "integer", "minimum": "x"}}, "minimum: expected a number"),
        ({"regex": "(("}, "^Regex parsing error at position 3: The parenthesis is not clos"),
        ({"regex": "a^b"}, r"^xgrammar does not enforce all of it: .*'\^' should be at the"),
        ({"regex": r"(a)\1"}, "Backreference is not supported"),
        (
            {"grammar": 'start: "a"'},
            "^the backend xgrammar has grammars in GBNF .*, not in .* Lark",
        ),
        ({"grammar": 'start: "::="'}, "not in the syntax of Lark"),
        ({"grammar": 'root ::= TagDispatch(("a", b))'}, "has no macros, got TagDispatch"),
        ({"grammar": "root ::= other"}, "^EBNF parser error"),
    ],
)
def test_what_is_wrong_or_not_enforced_is_refused(backend, fields, message):
    with pytest.raises(ValueError, match=message):
        compiled(backend, **fields)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ({"type": "token", "token": "<x>"}, "expected the text or id of a special token .* '<x>'"),
        ({"type": "token", "token": 65}, "expected the text or id of a special token .* 65"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "xgrammar does not enforce not"),
        ({"type": "grammar", "grammar": 'start: "a"'}, ".* not in the syntax of Lark"),
        (
            {**TRIGGERED, "triggers": ["<f", "<call>"], "tags": [TAG, CALLED]},
            "expected triggers for xgrammar that are all texts",
        ),
    ],
)
def test_parts_of_tags_that_it_has_not_are_refused(backend, format, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        tag(backend, format)


def test_a_lenient_request_leaves_out_what_is_not_enforced(backend):
    state = compiled(backend, json={"type": "number", "multipleOf": 2, "not": {}}, lenient=True)
    assert accepts(state, "3")
    assert not accepts(state, '"3"')


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "number", "multipleOf": 2}])
def test_a_lenient_structural_tag_leaves_it_out_too(backend, schema):
    format = {**TAG, "content": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(ValueError, match="^xgrammar does not enforce"):
        tag(backend, format)
    structural_tag = {"type": "structural_tag", "format": format}
    assert accepts(compiled(backend, structural_tag=structural_tag, lenient=True), "<f>3</f>")


@pytest.mark.parametrize(
    "grammar", ['root ::= "' + '\\"' * 500_000, "root ::= [" + "\\]" * 500_000]
)
def test_a_grammar_with_unfinished_text_is_read_in_one_pass(grammar):
    start = time.perf_counter()
    check_grammar(grammar)
    assert time.perf_counter() - start < 60


@pytest.mark.usefixtures("library")
def test_options_choose_how_json_is_written():
    backend = open_backend(any_whitespace=False, strict_mode=True)
    try:
        state = compiled(backend, json={"type": "object", "properties": {"a": {}, "b": {}}})
        assert accepts(state, '{"a": 1, "b": 2}')
        assert not accepts(state, '{"a":1}')
        assert not accepts(state, '{"c": 1}')
    finally:
        backend.close()


OBJECT = {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "keywords"),
    [
        ({"type": "array", "items": {"uniqueItems": True}}, ["uniqueItems"]),
        ({"properties": {"not": {"type": "string"}}}, []),
        ({"$defs": {"x": {"not": {}}}}, []),
        ({"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}, ["not"]),
        ({"$defs": {"x": {"not": {}}}, "$ref": "#//$defs/x"}, ["not"]),
        ({"$ref": "#", "description": "again"}, []),
        ({"$ref": "#/$defs/a~1b"}, ["$ref with escapes"]),
        ({"anyOf": [{"type": "string"}], "minLength": 1}, ["minLength together with anyOf"]),
        ({"type": "object", "anyOf": [OBJECT]}, ["type together with anyOf"]),
        ({"type": "string", "enum": ["x"]}, []),
        ({"type": "integer", "enum": [1, True]}, ["type together with enum"]),
        ({"type": ["integer", "null"], "const": None}, []),
        ({"allOf": [OBJECT]}, []),
        ({"allOf": [OBJECT, OBJECT]}, ["allOf of several schemas"]),
        ({"minimum": 1}, ["minimum without type"]),
        ({"type": "string", "minimum": 1}, []),
        ({**OBJECT, "required": ["a"]}, []),
        ({**OBJECT, "required": ["b"]}, ["required properties without a schema in properties"]),
        ({"type": "string", "format": "date"}, []),
        ({"type": "integer", "format": "int32"}, []),
        ({"type": "string", "format": "password", "pattern": "x"}, []),
        ({"type": "string", "format": "date", "pattern": "x"}, ["format together with pattern"]),
        ({"properties": {'"': {}}, "additionalProperties": False}, []),
        (
            {"properties": {'"': {}}},
            ["properties with escapes in names, without additionalProperties: false"],
        ),
        ({**OBJECT, "minProperties": 0}, []),
        ({**OBJECT, "minProperties": 1}, ["minProperties without additionalProperties: false"]),
        ({**OBJECT, "minProperties": 1, "additionalProperties": False}, []),
        ({"if": {}, "contains": {}, "items": {}, "type": "array"}, ["contains", "if"]),
        *(
            (schema, [])
            for schema in (True, 5, {"enum": 5}, {"type": 5}, {"allOf": 3}, {"properties": []})
        ),
    ],
)
def test_the_parts_of_a_schema_that_are_not_enforced_are_found(schema, keywords):
    assert unenforced_keywords(schema) == keywords


UNENFORCED = (
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1]),
    ({"type": "array", "contains": {"type": "integer"}}, ["x"]),
    ({"type": "array", "contains": {"type": "integer"}, "maxContains": 1}, [1, 1]),
    ({"type": "integer", "not": {"const": 1}}, 1),
    ({"type": "integer", "if": {"const": 1}, "then": False}, 1),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "dependentSchemas": {"a": {"minProperties": 2}}}, {"a": 1}),
    ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    ({**OBJECT, "patternProperties": {"^a": {"type": "string"}}}, {"a": 1}),
    ({**OBJECT, "propertyNames": {"maxLength": 0}}, {"a": 1}),
    ({**OBJECT, "unevaluatedProperties": False}, {"b": 1}),
    ({**OBJECT, "required": ["b"]}, {"a": 1}),
    ({"allOf": [{"type": "integer"}, {"maximum": 1}]}, 2),
    ({"anyOf": [{"type": "integer"}], "maximum": 1}, 2),
    ({"maximum": 1}, 2),
    ({"type": "number", "multipleOf": 2}, 3),
)


@pytest.mark.parametrize(("schema", "invalid"), UNENFORCED)
def test_what_is_refused_is_what_xgrammar_does_not_enforce(backend, schema, invalid):
    with pytest.raises(ValueError, match="xgrammar does not enforce"):
        compiled(backend, json=schema)
    assert accepts(compiled(backend, json=schema, lenient=True), json.dumps(invalid))


def nested(depth: int):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {**OBJECT, "properties": {"a": schema}, "additionalProperties": False}
    return schema


HOSTILE = (
    {"regex": "^(.{5000}x|.{4999}y)$"},
    {"regex": "(a|aa){1,1000}"},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    {"json": {"enum": [f"value {index}" for index in range(20_000)]}},
    {"json": nested(98)},
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
)


@pytest.mark.usefixtures("library")
def test_hostile_grammars_are_compiled_or_refused_in_time():
    backend = open_backend(seconds=2.0, max_bytes=512 << 20)
    compiler = compiler_of(backend)
    try:
        compiled(backend, regex="a")
        for fields in HOSTILE:
            limit(compiler, 2.0)
            start = time.perf_counter()
            try:
                allowed(compiled(backend, **fields))
            except ValueError as error:
                assert str(error)  # noqa: PT017
            assert time.perf_counter() - start < 60
            limit(compiler, 60.0)
            assert accepts(compiled(backend, regex="a"), "a")
    finally:
        backend.close()


SLOW = {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}}


@pytest.mark.usefixtures("library")
def test_a_grammar_that_needs_too_long_ends_its_process_alone():
    backend = open_backend(processes=2, max_bytes=64 << 30)
    compiler = compiler_of(backend)
    try:
        compiled(backend, regex="a")
        (first,) = backend.pids
        limit(compiler, 0.9)
        with pytest.raises(ValueError, match=r"^compiling .* took 0.9 s, and was not done"):
            compiled(backend, **SLOW)
        limit(compiler, 60.0)
        assert not psutil.pid_exists(first)
        assert accepts(compiled(backend, regex="a"), "a")
    finally:
        backend.close()


@pytest.mark.usefixtures("library")
def test_memory_is_limited():
    backend = open_backend(max_bytes=64 << 20)
    try:
        with pytest.raises(ValueError, match=r"needs more than 64 MiB of memory \(the option"):
            compiled(backend, **SLOW)
        assert accepts(compiled(backend, regex="a"), "a")
    finally:
        backend.close()


def test_threads_compile_side_by_side(backend):
    def one(index: int) -> bool:
        return accepts(compiled(backend, regex=f"a{{{index}}}"), "a" * index)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(1, 25)))
    assert len(backend.pids) <= 2


@pytest.mark.usefixtures("library")
def test_a_program_without_a_main_guard_works(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from hardpoint_xgrammar import XGrammar\n"
        "from hardpoint.plugins.grammars import GrammarContext, Vocabulary\n"
        "from hardpoint.plugins.structured import StructuredOutputs\n"
        "known = Vocabulary((b'a', b'b'))\n"
        "context = GrammarContext(name='x', options=XGrammar.Options(), vocabulary=known,\n"
        "                         vocab_size=2)\n"
        "backend = XGrammar(context)\n"
        "print(backend.compile(StructuredOutputs(regex='ba')).advance(1))\n"
        "print(*backend.pids, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=True
    )
    works, pid = done.stdout.split()
    assert works == "True"
    wait_until(lambda: not psutil.pid_exists(int(pid)))  # it ends with its parent


@pytest.mark.usefixtures("library")
def test_an_engine_uses_the_backend_by_its_name(tmp_path):
    config = scripted_config(
        write_scripted_model(tmp_path),
        {
            "plugins": {"enable": ["xgrammar"]},
            "grammar": {"use": "xgrammar", "compile_seconds": 120.0},
        },
    )
    params = [
        SamplingParams(structured={"choice": ["yes", "no"], **backend}, temperature=9.0, seed=n)
        for n in range(4)
        for backend in ({}, {"backend": "xgrammar"})
    ]
    with LLM(config=config) as llm:
        texts = {output.outputs[0].text for output in llm.generate(["x"] * len(params), params)}
    assert texts == {"yes", "no"}


@pytest.mark.usefixtures("library")
def test_a_lenient_answer_is_validated_against_the_whole_schema(tmp_path):
    config = scripted_config(
        write_scripted_model(tmp_path),
        {"plugins": {"enable": ["xgrammar"]}, "grammar": {"compile_seconds": 120.0}},
    )
    structured = {"json": {"enum": [1], "not": {}}, "lenient": True, "backend": "xgrammar"}
    with LLM(config=config) as llm:
        (output,) = llm.generate("x", SamplingParams(structured=structured))
    assert output.outputs[0].text == "1"
    assert "should not be valid under" in output.outputs[0].validation_error


def test_without_the_library_the_error_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    config = scripted_config(
        write_scripted_model(tmp_path),
        {"plugins": {"enable": ["xgrammar"]}, "grammar": {"use": "xgrammar"}},
    )
    with (
        pytest.raises(
            PluginLoadError,
            match=r"'xgrammar' .* it needs the library xgrammar: pip install 'xgrammar>=0\.2\.8,<0",
        ),
        LLM(config=config) as llm,
    ):
        llm.generate("x", SamplingParams(structured={"choice": ["yes"]}))


def test_importing_the_package_does_not_import_the_library():
    program = "import sys, hardpoint_xgrammar; sys.exit('xgrammar' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# Stands in for the program that compiles: what it answers is the request's text, or its own end.
FAKE = """
import json, os, sys, time
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
import msgspec
from hardpoint_xgrammar.compile_program import *
msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=Start)
write_frame(sys.stdout.buffer, msgspec.msgpack.encode(CompilerAnswer()))
while request := read_frame(sys.stdin.buffer):
    job = msgspec.msgpack.decode(request, type=Job)
    if job.text == "die":
        os._exit(3)
    if job.text.startswith("sleep"):
        time.sleep(float(job.text.split()[1]))
    write_frame(sys.stdout.buffer, msgspec.msgpack.encode(CompilerAnswer(grammar=job.text)))
"""
START = Start(tokens=[b"a"], special=[], vocab_size=1, threads=1, max_bytes=1 << 30)


@pytest.fixture
def fake(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    made = GrammarCompiler(START, 60.0, 2, tmp_path / "fake.py")
    yield made
    made.close()


def compiler_of(backend):
    """Return the compiler of a grammar backend."""
    return backend._compiler


def limit(compiler, seconds):
    """Change the time limit of a compiler."""
    for process in (compiler, *compiler._processes):
        process._seconds = seconds


def test_one_process_serves_one_thread_after_the_other(fake):
    assert fake.pids == []
    assert [fake.compile(Job("regex", text)).grammar for text in ("a", "b" * 10**6)] == [
        "a",
        "b" * 10**6,
    ]
    assert len(fake.pids) == 1


def test_a_process_that_ends_or_hangs_is_replaced(fake):
    fake.compile(Job("regex", "a"))
    (first,) = fake.pids
    with pytest.raises(ValueError, match="needs more than 1024 MiB of memory"):
        fake.compile(Job("regex", "die"))
    assert fake.compile(Job("regex", "a")).grammar == "a"
    (second,) = fake.pids
    assert second != first
    limit(fake, 0.5)
    with pytest.raises(ValueError, match="took 0.5 s, and was not done"):
        fake.compile(Job("regex", "sleep 60"))
    limit(fake, 60.0)
    assert not psutil.pid_exists(second)
    assert fake.compile(Job("regex", "a")).grammar == "a"


def test_threads_wait_for_a_process_within_their_time(fake):
    limit(fake, 1.0)
    for _ in range(2):
        threading.Thread(
            target=pytest.raises, args=(ValueError, fake.compile, Job("r", "sleep 60"))
        ).start()
    wait_until(lambda: len(fake.pids) == 2)
    start = time.perf_counter()
    try:
        assert fake.compile(Job("regex", "a")).grammar == "a"
    except ValueError as error:
        # Both were busy, or one was free when no time was left.
        assert "grammar.compile_seconds" in str(error)  # noqa: PT017
    assert time.perf_counter() - start < 60


def test_closing_ends_what_compiles(fake):
    fake.compile(Job("regex", "a"))
    (pid,) = fake.pids
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fake.compile, Job("regex", "sleep 60"))
        time.sleep(0.2)
        fake.close()
        with pytest.raises(ValueError, match="the engine is closed"):
            waiting.result(60)
    assert not psutil.pid_exists(pid)
    with pytest.raises(ValueError, match="the engine is closed"):
        fake.compile(Job("regex", "a"))


def test_a_program_that_does_not_start_is_named(tmp_path):
    (tmp_path / "fake.py").write_text("raise SystemExit(1)")
    made = GrammarCompiler(START, 60.0, 1, tmp_path / "fake.py")
    with pytest.raises(HardpointError, match="cannot compile grammars; does 'import xgramm"):
        made.compile(Job("regex", "a"))


def test_a_process_that_was_not_sent_its_start_message_ends(fake, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            fake.compile(Job("regex", "a"))
    assert fake.pids == []
    assert fake.compile(Job("regex", "a")).grammar == "a"


def test_frames_that_end_early_are_no_answers():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read:
        with os.fdopen(writing, "wb") as write:
            compile_program.write_frame(write, b"whole")
            write.write(compile_program.LENGTH.pack(9) + b"part")
        assert compile_program.read_frame(read) == b"whole"
        assert compile_program.read_frame(read) == b""
        assert compile_program.read_frame(read) == b""


def test_reasons_are_without_places():
    where = "[01:26:57] /project/cpp/regex_converter.cc:83: "
    assert compile_program.reason(f"{where}Regex parsing error\n") == "Regex parsing error"
    assert compile_program.reason(f"{where}Check failed: (x) is false: no end") == "no end"
    assert compile_program.reason("plain: text") == "plain: text"
