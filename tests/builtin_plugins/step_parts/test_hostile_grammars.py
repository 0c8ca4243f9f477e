"""Hostile grammars, and backends that fail: only their own requests end, in clear words."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import re
import resource

import pytest
from support.cases import nightly_but
from support.driving import FINAL, run, varied_jobs
from support.internals import keeps_nothing, output_processor_of
from support.plugins.bad_grammars import HELD
from support.processes import ROOT
from support.searching import searches_long
from support.waiting import wait_until

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.builtin_plugins.server.dialects.dialect import AnswerWriter
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import scripted_config, scripted_engine, write_scripted_model

BAD = "support.plugins.bad_grammars"
PLUGINS = {
    "enable": [
        {"use": f"{BAD}:BadGrammars", "name": "bad"},
        {"use": f"{BAD}:Forces", "name": "forces"},
    ]
}
NEIGHBOURS = varied_jobs(8)
FIELDS = {"max_tokens": 12, "temperature": 1.0, "seed": 3, **FINAL}


@pytest.fixture(scope="module")
def engine(scripted):
    engine = scripted_engine(scripted, {"plugins": PLUGINS})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(scripted):
    engine = scripted_engine(scripted)
    yield run(engine, NEIGHBOURS)
    engine.close()


@pytest.fixture
def impatient(scripted):
    extra = {"plugins": PLUGINS, "grammar": {"compile_seconds": 0.05}}
    HELD.clear()
    engine = scripted_engine(scripted, extra)
    yield engine
    HELD.set()
    engine.close()


def params(structured, **fields):
    return SamplingParams(structured=structured, **(FIELDS | fields))


def ends(engine, jobs, expected):
    """Run jobs while others run; return how each ended, after the others got their tokens.

    Returns:
        By request id, the error, or the finish reason and text.
    """
    endings, results = {}, {}
    waiting = [*NEIGHBOURS, *jobs]
    while waiting or engine.has_unfinished_requests():
        for name, prompt, each in waiting[-3:]:
            try:
                engine.add_request(name, prompt, each)
            except RequestError as error:
                endings[name] = str(error)
        del waiting[-3:]
        for output in engine.step():
            if output.finished and output.request_id in expected:
                results[output.request_id] = output
            elif output.finished:
                (completion,) = output.outputs
                endings[output.request_id] = completion.error or (
                    completion.finish_reason,
                    completion.text,
                )
    assert {name: tokens_of(output) for name, output in results.items()} == {
        name: [completion[1] for completion in completions]
        for name, (completions,) in expected.items()
    }
    assert keeps_nothing(output_processor_of(engine))
    return endings


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


def chain(count, link, last):
    """A schema of definitions, each with a reference to the next one."""
    schemas = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**schemas, f"d{count}": last}, "$ref": "#/$defs/d0"}


def of(name):
    return {"$ref": f"#/$defs/{name}"}


def an_object(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = an_object(schema)
    return schema


def optional(count):
    properties = {f"p{i}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


INTEGER = {"type": "integer"}
WORKS = None
NOTHING = "no (JSON|text of this model's tokens) fits"
SCHEMAS = {
    "a type that there is not": (
        {"type": "strin"},
        r'json.type: expected "array" or .*, got .strin',
    ),
    "a type that is a number": ({"type": 5}, "json.type: expected a string or a list, got 5"),
    "properties that are a list": (
        {"properties": [1]},
        r"json.properties: expected a table, got \[1\]",
    ),
    "a property that is a number": (
        {"properties": {"a": 3}},
        "json.properties.a: expected true or false or a table, got 3",
    ),
    "required that is a text": (
        {"type": "object", "required": "a"},
        "json.required: expected a list, got 'a'",
    ),
    "a reference to nothing": (of("none"), r"to a schema in this document.* got '#/\$defs/none'"),
    "a reference to a page": (
        {"$ref": "http://example.com/x"},
        "to a schema in this document.* got 'http://example.com/x'",
    ),
    "a reference that is a number": ({"$ref": 5}, r"json.\$ref: expected a string, got 5"),
    "minimum over maximum": ({**INTEGER, "minimum": 5, "maximum": 4}, "minimum.*is greater than"),
    "minLength over maxLength": (
        {"type": "string", "minLength": 5, "maxLength": 4},
        "minLength.*is greater than maxLength",
    ),
    "minItems over maxItems": (
        {"type": "array", "minItems": 5, "maxItems": 4},
        "minItems.*is greater than maxItems",
    ),
    "an enum of nothing": ({"enum": []}, "Unsatisfiable schema"),
    "anyOf nothing": ({"anyOf": []}, "Unsatisfiable schema"),
    "text and integer": ({"allOf": [{"type": "string"}, INTEGER]}, "incompatible types"),
    "required and not allowed": (
        {"type": "object", "required": ["a"], "additionalProperties": False},
        "required property 'a' is unsatisfiable",
    ),
    "required and false": (an_object(False), "required property 'a' is unsatisfiable"),
    "an integer of texts": ({"type": "integer", "enum": ["a"]}, "incompatible types"),
    "nothing": (False, "no JSON fits the schema false"),
    "2 MB": ({"enum": ["x" * 2_000_000]}, r"at most 1048576 bytes \(grammar.max_bytes\), got 2000"),
    "a text of 900 KB": ({"const": "x" * 900_000}, "at most 32768 characters, got 900000"),
    "a name of 100 KB": (optional(1) | {"properties": {"x" * 100_000: INTEGER}}, "at most 32768"),
    "a description of 900 KB": ({**INTEGER, "description": "x" * 900_000}, WORKS),
    "20 000 values": ({"enum": [f"v{i}" for i in range(20_000)]}, WORKS),
    "2000 optional properties": (optional(2000), WORKS),
    "20 000 optional properties": (optional(20_000), "schema too large"),
    "itself": ({"$ref": "#"}, NOTHING),
    "itself or itself": ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, NOTHING),
    "each other": ({"$defs": {"a": of("b"), "b": of("a")}, **of("a")}, NOTHING),
    "itself as a required property": ({"$defs": {"a": an_object(of("a"))}, **of("a")}, WORKS),
    "lists of lists": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, WORKS),
    "2 to the 25th anyOf": (chain(25, lambda it: {"anyOf": [it, it]}, INTEGER), WORKS),
    "2 to the 25th allOf": (chain(25, lambda it: {"allOf": [it, it]}, INTEGER), WORKS),
    "2000 references": (chain(2000, lambda it: it, INTEGER), WORKS),
    "1500 objects by reference": (chain(1500, an_object, INTEGER), WORKS),
    "2000 allOf": (chain(2000, lambda it: {"allOf": [it]}, INTEGER), WORKS),
    "60 nested objects": (nested(60), WORKS),
    "90 nested objects": (nested(90), "recursion limit exceeded"),
    "300 nested objects": (nested(300), "structured.json: expected at most 200 levels, got more"),
    "a million items": ({"type": "array", "items": INTEGER, "minItems": 1_000_000}, WORKS),
    "a thousand million characters": ({"type": "string", "maxLength": 10**9}, WORKS),
    "a range that no float has": (
        {"type": "number", "minimum": -1e300, "maximum": 1e300},
        "Failed to generate regex for float range",
    ),
    "a number of more than 64 bits": ({**INTEGER, "minimum": 10**30}, "at most 64 bits"),
    "multiples of 0": ({"type": "number", "multipleOf": 0}, "invalid multiple of"),
    "multiples of ten millions": (
        {**INTEGER, "multipleOf": 9_999_991},
        "multipleOf: expected at most 100000 .*got 9999991",
    ),
    "common multiples": (
        {**INTEGER, "allOf": [{"multipleOf": number} for number in (97, 89, 83, 79)]},
        "multipleOf: .*common multiple of several, got \\d+ or more",
    ),
    "repetitions of repetitions": (
        {"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"},
        WORKS,
    ),
    "a pattern that looks ahead": ({"type": "string", "pattern": "^(?=a)b$"}, "look-around"),
    "keywords that are not supported": (
        {"type": "array", "uniqueItems": True, "contains": INTEGER},
        "contains: expected maxItems of at most 32.*; with `lenient`, the grammar leaves it out",
    ),
    "options of the library": (
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
        "uniqueItems: expected items of an enum, with few values",
    ),
    "half a character": ({"enum": ["\ud800"]}, "expected text that UTF-8 can hold"),
}
EXPRESSIONS = {
    "two that end differently": ("^(.{5000}x|.{4999}y)$", WORKS),
    "a or aa, a thousand times": ("(a|aa){1,1000}", WORKS),
    "a star of a star": ("(a*)*b", WORKS),
    "pluses in pluses": ("(x+x+)+y", WORKS),
    "100 000 of anything": (".{1,100000}", WORKS),
    "a thousand million": ("a{1,1000000000}", WORKS),
    "repeated repetitions": ("(([a-z]{1,100}){1,100}){1,100}", WORKS),
    "the 25th but last": ("(a|b)*a(a|b){25}", WORKS),
    "6000 optional": ("a?" * 6000, r"at most 5000 repetitions \(\? \* \+ {}\), got 6000"),
    "40 000 characters": ("a" * 40_000, "at most 32768 characters, got 40000"),
    "5000 groups": ("(" * 5000 + "a" + ")" * 5000, "exceed the maximum number of nested"),
    "a look ahead": ("(?=a)b", "look-ahead and look-behind, is not supported"),
    "a look behind": ("(?<!a)b", "look-ahead and look-behind, is not supported"),
    "a reference back": (r"(a)\1", "backreferences are not supported"),
    "an open group": ("(", "unclosed group"),
    "an open class": ("[", "unclosed character class"),
    "an open class of letters": ("[é\U0001f600", "unclosed character class"),
    "a repetition of nothing": ("*a", "repetition operator missing expression"),
    "half a character": (r"\uD800", "not a Unicode scalar value"),
    "no character": (r"[^\s\S]", "no text of this model's tokens fits it"),
}
GRAMMARS = {
    "left recursion": ('start: start "a" | "b"', WORKS),
    "left recursion alone": ('start: start "a"', "no text of this model's tokens fits it"),
    "two rules of each other": ("start: a\na: b\nb: a", "no text of this model's tokens fits it"),
    "a terminal of itself": ("start: A\nA: B\nB: A", "circular reference in token"),
    "the empty text": ('start: ("")*', "no text of this model's tokens fits it, but the empty one"),
    "a rule that there is not": ("start: foo", 'unknown name: "foo"'),
    "a group that is open": ("start: (", "Expected token"),
    "no start": ('foo: "a"', "neither Lark nor GBNF: Expected ::= at line 1"),
    "GBNF": ('root ::= "a" root | "b"', WORKS),
    "GBNF that is wrong": ("root ::= (", r"neither Lark nor GBNF: Expected '\)'"),
    "GBNF of 5000 groups": ("root ::= " + "(" * 5000, "neither Lark nor GBNF"),
    "a special token that there is not": ("start: <|nope|>", "unknown special token"),
    "the end token": ("start: <[256]>", "it allows no token after the output so far"),
    "a token outside": ("start: <[9999]>", "Token range end too large"),
    "any number of anything": ('start: a\na: a a | "x" | ""', WORKS),
    "2 to the 40th of a rule": (
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"',
        WORKS,
    ),
    "2 to the 40th of a terminal": (
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"',
        "too big",
    ),
    "20 000 rules in a row": (
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"',
        WORKS,
    ),
    "3000 groups": ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
    "a schema that is wrong": ('start: %json {"type": "strin"}', "Invalid type: strin"),
    "a file": ('%import "/etc/passwd"\nstart: INT', "Expected name"),
    "a long text": (f'start: "{"x" * 40_000}"', "at most 32768 characters, got 40002"),
}
TEXTS = ["a\nb", '"q"', "\U0001f600", "\\", "/x/", "a\\nb", "\x00\x7f", "é\u2028", "a", "ab", "a"]
CHOICES = {
    "10 000": ([f"choice {i}" for i in range(10_000)], WORKS),
    "none": ([], "structured.choice: expected a list of length >= 1"),
    "an empty one": ([""], r"structured.choice\[0\]: expected a string of length >= 1"),
    "of all characters, twice": (TEXTS + TEXTS, WORKS),
    "a long one": (["x" * 100_000], "at most 32768 characters, got 100000"),
    "half a character": (["\ud800"], "expected text that UTF-8 can hold"),
}
TEXT = {"type": "const_string", "value": "x"}
ANY = {"type": "any_text"}
SCHEMA = {"type": "json_schema", "json_schema": INTEGER}


def triggered(triggers, begin):
    tags = [{"type": "tag", "begin": begin, "content": SCHEMA, "end": ">"}]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def stars(depth):
    tag = TEXT
    for _ in range(depth):
        tag = {"type": "star", "content": tag}
    return tag


TAGS = {
    "an unknown part": (
        {"type": "foo"},
        r'structural_tag.format.type: expected "const_string" or .*, got .foo.',
    ),
    "a trigger that begins no tag": (triggered(["<a", "<z"], "<a>"), "begin a tag, got '<z'"),
    "a tag without its trigger": (triggered(["<z"], "<a>"), r"one of the triggers \['<z'\]"),
    "500 deep": (stars(500), "structured.structural_tag: expected at most 200 levels"),
    "190 deep": (stars(190), WORKS),
    "a schema that is wrong": (
        {"type": "json_schema", "json_schema": {"type": "strin"}},
        "Invalid type: strin",
    ),
    "an expression that is wrong": ({"type": "regex", "pattern": "("}, "unclosed group"),
    "a grammar that is wrong": ({"type": "grammar", "grammar": "start: ("}, "Expected token"),
    "a token that there is not": (
        {"type": "token", "token": "<nope>"},
        "the tokenizer has no special token '<nope>'",
    ),
    "a token outside": ({"type": "token", "token": 99_999}, "expected an id from 0 to 256"),
    "two free texts": (sequence(ANY, ANY), "any_text: expected a text or a special token after"),
    "the end token within": (
        sequence({"type": "token", "token": "<eos>"}, TEXT),
        "it allows no token after the output so far",
    ),
    "nothing": ({"type": "const_string", "value": ""}, "fits it, but the empty one"),
    "2000 parts": (sequence(*[TEXT] * 2000), WORKS),
    "stars of anything": ({"type": "star", "content": {"type": "star", "content": ANY}}, WORKS),
    "control characters": (
        {"type": "const_string", "value": 'a\nb\u2028\x7f\x00\U0001f600"\\'},
        WORKS,
    ),
}
FAMILIES = {
    "json": SCHEMAS,
    "regex": EXPRESSIONS,
    "grammar": GRAMMARS,
    "choice": CHOICES,
    "structural_tag": TAGS,
}


LARGE = {"20 000 optional properties", "2000 allOf", "2 to the 40th of a terminal"}
"""Descriptions that take a second each, and run with `--all`."""


def described(field, sample):
    if field == "structural_tag":
        return {field: {"type": "structural_tag", "format": sample}}
    return {field: sample}


@pytest.mark.parametrize("field", FAMILIES)
def test_hostile_descriptions_work_or_are_refused_by_name(engine, expected, field):
    samples = {
        name: sample
        for name, sample in FAMILIES[field].items()
        if searches_long() or name not in LARGE
    }
    before = peak_mb()
    jobs = [
        (name, "hi there", params(described(field, sample)))
        for name, (sample, _) in samples.items()
    ]
    endings = ends(engine, jobs, expected)
    for name, (_, words) in samples.items():
        if words is WORKS:
            assert endings[name][0] in ("stop", "length"), (name, endings[name])
        else:
            assert isinstance(endings[name], str), (name, endings[name])
            assert endings[name].startswith(f"structured.{field}"), (name, endings[name])
            assert re.search(words, endings[name]), (name, endings[name])
            assert len(endings[name]) < 1200, name
    assert peak_mb() - before < 600


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_choice_is_one_of_the_texts(engine, expected):
    jobs = [
        (f"{i}", "hi there", params({"choice": [text]}, max_tokens=40))
        for i, text in enumerate(TEXTS)
    ]
    endings = ends(engine, jobs, expected)
    assert [endings[f"{i}"] for i in range(len(TEXTS))] == [("stop", text) for text in TEXTS]


def test_one_that_may_go_on_is_either(engine, expected):
    jobs = [(f"{i}", f"hi {i}", params({"choice": ["a", "ab", "abc"]}, seed=i)) for i in range(40)]
    endings = ends(engine, jobs, expected)
    assert set(endings.values()) == {("stop", "a"), ("stop", "ab"), ("stop", "abc")}


FAILURES = {
    "compile": "plugin 'bad' .*its compile failed: KeyError: 'broken compile'",
    "exit": "plugin 'bad' .*its compile failed: SystemExit: broken compile",
    "refuse": "structured.regex: bad: not this one",
    "none": "plugin 'bad' .*its compile failed: .*NoneType",
    "fork": "plugin 'bad' .*KeyError: 'broken fork'",
    "first mask": "plugin 'bad' .*KeyError: 'broken mask'",
    "mask": "plugin 'bad' .*its grammar failed: KeyError: 'broken mask'",
    "beyond": "plugin 'bad' .*its grammar failed: IndexError",
    "advance": "plugin 'bad' .*its grammar failed: KeyError: 'broken advance'",
    "refuses": "structured.regex: bad: it does not allow the token 6[45], the output's number 1",
    "empty": "structured.regex: bad: it allows no token after the output so far",
    "outside alone": "structured.regex: bad: it allows no token after the output so far",
}


def bad(how, **fields):
    return params({"regex": how, "backend": "bad"}, **fields)


def test_what_fails_in_a_backend_ends_its_requests_alone(engine, expected):
    jobs = [(how, "hi there", bad(how)) for how in FAILURES]
    endings = ends(engine, [*jobs, ("outside", "hi there", bad("outside"))], expected)
    for how, words in FAILURES.items():
        assert isinstance(endings[how], str), (how, endings[how])
        assert re.search(words, endings[how]), (how, endings[how])
    assert re.fullmatch("[ab]{12}", endings["outside"][1])
    # Faults of several requests do not shut the backend for those that are right.
    assert ends(engine, [("fine", "hi there", bad("fine"))], expected)["fine"][0] == "length"


def test_the_same_in_a_process_of_its_own(scripted, expected):
    extra = {"plugins": PLUGINS, "engine": {"in_process": False}}
    with LLM(config=scripted_config(scripted, extra)) as llm:
        names, prompts, each = zip(*NEIGHBOURS, strict=True)
        hostile = ["compile", "mask", "empty"]
        outputs = llm.generate(
            [*prompts, *["hi there"] * 4],
            [*each, *map(bad, hostile), params({"json": chain(1500, an_object, INTEGER)})],
        )
    for name, output in zip(names, outputs, strict=False):
        assert tokens_of(output) == [completion[1] for completion in expected[name][0]], name
    for how, output in zip(hostile, outputs[len(names) :], strict=False):
        assert re.search(FAILURES[how], output.outputs[0].error)
    assert outputs[-1].outputs[0].finish_reason == "length"


class TestCompilationsThatHang:
    def test_the_request_ends_after_the_limit(self, impatient, expected):
        endings = ends(impatient, [("r", "hi there", bad("hang"))], expected)
        assert endings["r"] == (
            "structured.regex: bad: compiling it took longer than 0.05 s (grammar.compile_seconds)"
        )

    def test_after_four_of_them_no_other_begins(self, impatient, expected):
        jobs = [(f"{i}", "hi there", bad(f"hang {i}")) for i in range(4)]
        for job in jobs:
            endings = ends(impatient, [job], expected)
            assert "took longer than 0.05 s" in endings[job[0]]
        endings = ends(impatient, [("r", "hi there", bad("fine"))], expected)
        assert endings["r"] == (
            "structured.regex: bad: no grammar is compiled, for 4 compilations that took longer "
            "than 0.05 s still run"
        )
        HELD.set()

        def works():
            return ends(impatient, [("r", "hi there", bad("fine"))], expected)["r"][0] == "length"

        wait_until(works, what="the compilations to end")

    def test_one_that_is_aborted_leaves_nothing(self, open_engine, expected):
        HELD.clear()
        engine = open_engine({"plugins": PLUGINS})
        for i in range(3):  # two are compiled at a time, the third is not begun
            engine.add_request(f"{i}", "hi there", bad(f"hang {i}"))
        engine.step()
        assert [reason.message for reason in engine.why_waiting("2").values()]
        engine.abort_requests(["0", "1", "2"])
        assert not engine.has_unfinished_requests()
        assert run(engine, NEIGHBOURS) == expected
        HELD.set()
        endings = ends(engine, [("0", "hi there", bad("fine"))], expected)
        assert endings["0"][0] == "length"

    def test_the_timeout_of_a_request_holds_meanwhile(self, open_engine, expected):
        HELD.clear()
        engine = open_engine({"plugins": PLUGINS})
        engine.add_request("r", "hi there", bad("hang"), RequestExtras(timeout=2e-5))
        reasons = []
        while engine.has_unfinished_requests():
            reasons += [o.outputs[0].finish_reason for o in engine.step() if o.finished]
        assert reasons == ["timeout"]
        assert run(engine, NEIGHBOURS) == expected
        HELD.set()

    def test_closing_the_engine_does_not_wait_for_them(self, scripted):
        HELD.clear()
        engine = scripted_engine(scripted, {"plugins": PLUGINS})
        engine.add_request("r", "hi there", bad("hang"))
        engine.step()
        engine.close()
        HELD.set()


REFUSED = {
    "an unknown backend": (
        {"structured": {"regex": "a", "backend": "llguidence"}},
        "structured.backend: expected an enabled grammar backend .*llguidance.*got 'llguidence'",
    ),
    "a format that the backend lacks": (
        {"structured": {"json": INTEGER, "backend": "bad"}},
        "structured.json: the grammar backend 'bad' takes regex, choice",
    ),
    "no token that ends": (
        {"structured": {"regex": "a"}, "ignore_eos": True},
        "structured: it needs a token that ends the output, but ignore_eos is true",
    ),
    "too large": (
        {"structured": {"choice": ["x" * 1000] * 1100}},
        r"structured.choice: expected at most 1048576 bytes \(grammar.max_bytes\), got 11",
    ),
    "two at once": (
        {"structured": {"regex": "a", "json": INTEGER}},
        "structured: expected one of .* got json and regex",
    ),
    "none": ({"structured": {"lenient": True}}, "structured: expected one of .*got none of them"),
}


def test_what_cannot_be_compiled_at_all_is_refused_when_it_is_added(engine, expected):
    jobs = iter(NEIGHBOURS)
    for fields, words in REFUSED.values():
        engine.add_request(*next(jobs))
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", "hi there", SamplingParams(**FINAL, **fields))
    assert {**run(engine, list(jobs)), **expected} == expected
    assert keeps_nothing(output_processor_of(engine))


def test_an_end_that_only_the_tokenizer_has_ends_no_answer(tmp_path):
    folder = write_scripted_model(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": None}))
    tokenizer = {"use": "support.broken.tokenizers:EndsBeyond"}
    with contextlib.closing(scripted_engine(folder, {"tokenizer": tokenizer})) as engine:
        with pytest.raises(RequestError, match="a token that ends the output, but the model has"):
            engine.add_request("r", "hi there", params({"regex": "ab"}))
        ended = run(engine, [("r", "hi there", params({"regex": "ab"}, stop_token_ids=[256]))])
    assert ended["r"][0][0][2:4] == ("ab", "stop")


class TestWithProcessors:
    """A grammar and a processor that together leave no token; both are named."""

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"min_tokens": 8}, "min_tokens"),
            ({"allowed_token_ids": [70, 71]}, "allowed_token_ids"),
            ({"bad_words": ["b"]}, "bad_words"),
        ],
    )
    def test_nothing_left(self, engine, expected, fields, words):
        endings = ends(engine, [("r", "hi there", params({"regex": "aab"}, **fields))], expected)
        assert words in endings["r"]
        assert "the grammar of `structured`" in endings["r"]

    def test_a_forced_token_that_is_forbidden(self, engine, expected):
        job = ("r", "hi there", params({"regex": "a{9}"}, plugin_args={"forces": {}}))
        assert ends(engine, [job], expected)["r"] == (
            "forces forced the token 89, which the grammar of `structured` forbids"
        )

    def test_a_forced_token_that_is_allowed(self, engine, expected):
        job = ("r", "hi there", params({"regex": "[az]{9}"}, plugin_args={"forces": {}}))
        assert re.fullmatch("[az]{2}z[az]{6}", ends(engine, [job], expected)["r"][1])

    def test_a_thinking_budget_with_markers_of_its_own(self, engine, expected):
        budget = {"start": [64, 64], "end": [89], "thinking_token_budget": 3}
        fields = {"plugin_args": {"thinking_budget": budget}}
        job = ("r", "hi there", params({"regex": "a{9}"}, **fields))
        assert ends(engine, [job], expected)["r"] == (
            "plugin_args.thinking_budget: expected no markers of its own together with "
            "`structured`: the structured answer begins after the markers of the reasoning parser"
        )


def num_answers():
    gc.collect()
    return sum(isinstance(item, AnswerWriter) for item in gc.get_objects())


@pytest.mark.nightly
def test_nothing_of_a_request_stays_in_the_engine(scripted):
    with contextlib.closing(scripted_engine(scripted)) as engine:
        for index in range(5):
            job = (f"r{index}", "x", params({"regex": f"a{{{index + 1}}}"}))
            run(engine, [job])
            assert num_answers() <= 1  # the next plan reports that it has ended
        run(engine, [("last", "x", SamplingParams(max_tokens=3, **FINAL))])
        assert num_answers() == 0


class NoGrammars(DefaultScheduler):
    """Plans requests as if none had a grammar."""

    contract = 1

    def __init__(self, context):
        super().__init__(dataclasses.replace(context, gates=None, grammars=None))
        self.context = context


def test_a_scheduler_that_plans_without_grammars_ends_their_requests(scripted, expected):
    with contextlib.closing(
        scripted_engine(scripted, {"scheduler": {"use": f"{__name__}:NoGrammars"}})
    ) as engine:
        endings = ends(engine, [("bad", "x", params({"regex": "a+"}))], expected)
        message = (
            r"NoGrammars\), asked for by scheduler.use: it planned the request without its grammar"
        )
        assert re.search(message, endings["bad"])


def test_a_scheduler_that_supports_no_grammars_refuses_their_requests(scripted, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "acme_tiny_scheduler" / "src"))
    use = "tiny_scheduler:TinyScheduler"
    with contextlib.closing(scripted_engine(scripted, {"scheduler": {"use": use}})) as engine:
        free = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, **FINAL)
        results = run(engine, [("free", "x", free)])
        assert len(results["free"][0][0][1]) == 3
        with pytest.raises(RequestError, match="structured: 'tiny_scheduler' does not support it"):
            engine.add_request("bad", "x", params({"regex": "a+"}))


@pytest.mark.parametrize("how", nightly_but(["empty", "mask", "advance"], "advance"))
def test_a_draft_after_which_a_grammar_cannot_go_on_ends_no_request(scripted, how):
    """The same tokens and the same end as without drafts, of right drafts and of wrong ones."""
    prompt = [5, 6]
    stuck = {"plugins": {"enable": [{"use": f"{BAD}:Stuck", "name": "stuck"}]}}

    def ends_with(replies, *jobs):
        speculator = "hardpoint.testing:ScriptedSpeculator"
        speculation = {"speculation": {"use": [speculator], "adaptive": False}} if replies else {}
        options = {"plugin": {"scripted_speculator": {"replies": replies}}} if replies else {}
        engine, completions = scripted_engine(scripted, stuck | speculation | options), []
        for after, count in jobs:
            structured = StructuredOutputs(regex=f"{how} {after}", backend="stuck")
            engine.add_request("r", prompt, params(structured, max_tokens=count))
            while engine.has_unfinished_requests():
                completions += [output.outputs[0] for output in engine.step() if output.finished]
        verified = engine.call_utility("scheduler_stats").num_verified_drafts
        engine.close()
        return [(c.token_ids, c.finish_reason, c.error) for c in completions], verified

    (((tokens, _, _),), _) = ends_with([], (40, 12))
    right = next(t for place, t in enumerate(tokens) if place > 3 and t not in tokens[:place])
    place, wrong = tokens.index(right), next(t for t in range(32) if t not in tokens)
    jobs = [(right, place + 1), (right, 12), (wrong, 12)]
    expected, _ = ends_with([], *jobs)
    assert [(reason, bool(error)) for _, reason, error in expected] == [
        ("length", False),
        ("error", True),
        ("length", False),
    ]
    misled = [*tokens[:4], wrong, *tokens[5:]]
    for reply in (tokens, misled):
        results, verified = ends_with([[prompt, reply]], *jobs)
        assert results == expected
        assert verified > 0
