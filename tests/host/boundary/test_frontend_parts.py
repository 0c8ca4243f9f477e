"""Frontend halves of step parts: their order, their faults, and what they see of the plugins."""

from __future__ import annotations

import pytest
from support.samples import Sample

from hardpoint.configuration.loading import config_from
from hardpoint.errors import (
    HardpointError,
    PluginConflictError,
    PluginFaultError,
    PluginNotFoundError,
    RequestError,
)
from hardpoint.host.boundary.parts.frontend_parts import frontend_parts
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    CompletionOutput,
    EngineCoreRequest,
    FrontendHalf,
    SamplingParams,
    StepPart,
)
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.plugins.text import OutputFormat, OutputReader, RequestedCalls

DONE = []


class Labels(Sample, StepPart, contract=1):
    """Appends its name to a tag of each request."""

    def frontend_half(self, context):
        return Half(self.name, context)


class Half(FrontendHalf):
    def __init__(self, name, context):
        self.name, self.context = name, context

    def prepare(self, request, reasoning):
        request.tags = {"by": request.tags.get("by", "") + self.name + "."}

    def close(self):
        DONE.append(self.name)


class First(Labels):
    before = ("labels", "for_tags")


class OnlyInTheEngine(Sample, StepPart, contract=1):
    def __init__(self, context):
        raise AssertionError("nothing of it is needed in the frontend")


class Refusing(Labels):
    def frontend_half(self, context):
        return RefusingHalf(self.name, context)


class RefusingHalf(Half):
    def prepare(self, request, reasoning):
        raise RequestError(f"tags.tenant: expected one, got {request.tags}")


class Failing(Labels):
    def frontend_half(self, context):
        return FailingHalf(self.name, context)


class FailingHalf(Half):
    def prepare(self, request, reasoning):
        return {}[request.request_id]

    def reads_answer(self, request):
        if request.priority:
            raise ValueError("no priorities")
        return True

    def validate(self, request, answer):
        return ["wrong"] if answer == "list" else {}[answer]


class ForTags(Labels):
    contract = 1

    def frontend_half(self, context):
        return ForTagsHalf(self.name, context)


class ForTagsHalf(Half):
    for_fields = ("tags",)

    def reads_answer(self, request):
        return True

    def validate(self, request, answer):
        return f"{request.tags['by']}: {answer}"


class Asking(Labels):
    """Asks for a component in a wrong way."""

    def frontend_half(self, context):
        return AskingHalf(self.name, context)


class AskingHalf(Half):
    def prepare(self, request, reasoning):
        components = self.context.components
        assert components.find("grammars", "llguidanc") is None
        assert components.hint("grammars", "llguidanc") == " (did you mean 'llguidance'?)"
        with pytest.raises(PluginNotFoundError, match="llguidanc"):
            components.source("grammars", "llguidanc")
        components.call("grammars", "llguidance", "validate", None, "3")


class Letters(Labels):
    """Reads prompts of letters, after one of any form."""

    def frontend_half(self, context):
        return LettersHalf(self.name, context)


class LettersHalf(Half):
    prompt_keys = ("letters",)

    def read_prompt(self, prompt, reader):
        text = prompt.pop("letters")
        before = reader(prompt) if prompt else []
        fields = {} if text != "x" else {"resumable": True}
        return GivenPrompt(token_ids=[*before, *text.encode()], fields=fields, cut=self.cut)

    def cut(self, limit):
        if limit == 1:
            raise RequestError("truncate_prompt_tokens: expected more than 1, got 1")
        return GivenPrompt(token_ids=[0] * max(limit, 4) if limit > 2 else None)


class OtherLetters(Letters):
    contract = 1


class NoHalf(Labels):
    def frontend_half(self, context):
        return "half"


class CannotStart(Labels):
    def frontend_half(self, context):
        raise OSError("no such file")


class Placing(Labels):
    def frontend_half(self, context):
        return PlacingHalf(self.name, context)


class PlacingHalf(Half):
    media_tokens = {"image": (7,)}

    prompt_keys = ("multi_modal_data",)

    def read_prompt(self, prompt, reader):
        return GivenPrompt(token_ids=prompt["prompt_token_ids"])


class Reading(Placing):
    def frontend_half(self, context):
        return ReadingHalf(self.name, context)


class ReadingHalf(PlacingHalf):
    def read_media(self, modality, items):
        found = items[0][1]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, list) else [f"{modality} {item}" for _, item in items]


def parts_of(*classes, disable=()):
    enabled = [f"{__name__}:{cls.__name__}" for cls in classes]
    config, sources = config_from({"plugins": {"enable": enabled, "disable": list(disable)}})
    about = {"config": config}
    return frontend_parts(resolve_plugins(config, sources), about, _no_vocabulary, 9, list)


def _no_vocabulary():
    raise NotImplementedError("this tokenizer has none")


def request(**fields):
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(), **fields
    )


def test_halves_complete_a_request_in_the_order_of_their_parts():
    parts, given = parts_of(Labels, First, OnlyInTheEngine), request()
    parts.prepare(given, None)
    assert given.tags == {"by": "first.labels."}
    DONE.clear()
    parts.close()
    assert sorted(DONE) == ["first", "labels"]


def test_a_half_gets_requests_alone_that_set_a_field_which_it_declares():
    parts, given = parts_of(ForTags), request()
    parts.prepare(given, None)
    assert given.tags == {}
    assert parts.validator_of(given) is None
    assert parts.validate(given, "a") is None
    tagged = request(tags={"a": "b"})
    parts.prepare(tagged, None)
    assert tagged.tags["by"] == "for_tags."
    assert parts.validator_of(tagged)
    assert parts.validate(tagged, "a") == "for_tags.: a"


def test_a_field_that_a_half_sets_selects_the_request_for_those_after_it():
    parts, given = parts_of(ForTags, First), request()
    parts.prepare(given, None)
    assert given.tags == {"by": "first.for_tags."}


def test_a_half_refuses_a_request_in_its_own_words():
    with pytest.raises(RequestError, match=r"^tags.tenant: expected one, got \{\}$"):
        parts_of(Refusing).prepare(request(), None)


def test_a_fault_ends_the_request_that_it_is_about_and_is_recorded():
    parts, recorded = parts_of(Failing), []
    parts.report_to(lambda *fault: recorded.append(fault))
    name = f"plugin 'failing' \\({__name__}:Failing\\), .*"
    with pytest.raises(RequestError, match=rf"{name}: its prepare\(\) failed: KeyError: 'r'$"):
        parts.prepare(request(), None)
    with pytest.raises(RequestError, match=rf"{name}: its reads_answer\(\) failed: ValueError: no"):
        parts.validator_of(request(priority=1))
    assert [(part, request_id) for part, request_id, _ in recorded] == [("failing", "r")] * 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("3", "its validate() failed: KeyError: '3'"),
        ("list", "its validate() returned ['wrong'], expected text or None"),
    ],
)
def test_a_fault_in_validation_is_the_flaw_and_the_answer_stays(answer, reason):
    parts, recorded = parts_of(Failing), []
    parts.report_to(lambda *fault: recorded.append(fault))
    assert parts.validator_of(request())
    found = parts.validate(request(), answer)
    assert found.startswith("the answer cannot be validated: plugin 'failing'")
    assert found.endswith(reason)
    assert recorded == [("failing", "r", found)]


def test_a_fault_of_a_component_that_a_half_asks_names_the_component():
    with pytest.raises(RequestError, match="^plugin 'llguidance'.*its validate failed: Attrib"):
        parts_of(Asking).prepare(request(), None)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (NoHalf, r"its frontend_half\(\) gave 'half', expected a FrontendHalf or None"),
        (CannotStart, r"its frontend_half\(\) failed: OSError: no such file"),
    ],
)
def test_a_half_that_cannot_be_built_is_named_and_the_others_are_closed(cls, message):
    DONE.clear()
    with pytest.raises(PluginFaultError, match=message):
        parts_of(Labels, cls)
    assert DONE == ["labels"]


def test_a_part_reads_prompts_with_its_keys_and_no_others():
    parts = parts_of(Letters)
    assert parts.read_prompt({"prompt": "a"}, None) is None
    assert parts.reads_prompt({"letters": "ab", "prompt": "c"})
    assert not parts.reads_prompt({"letter": "ab"})
    given = {"letters": "b", "prompt": "a"}
    found = parts.read_prompt(given, lambda rest: list(rest["prompt"].encode()))
    assert found.token_ids == list(b"ab")
    assert given == {"letters": "b", "prompt": "a"}
    assert found.cut(4).token_ids == [0, 0, 0, 0]
    with pytest.raises(RequestError, match="^truncate_prompt_tokens: expected more than 1, got 1$"):
        found.cut(1)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (
            lambda parts: parts.read_prompt({"letters": 3}, None),
            r"its read_prompt\(\) failed: AttributeError: 'int'",
        ),
        (
            lambda parts: parts.read_prompt({"letters": "x"}, None),
            r"its read_prompt\(\) failed: .* expected fields that parts make use of alone, "
            r"got \['resumable'\]",
        ),
        (
            lambda parts: parts.read_prompt({"letters": "ab"}, None).cut(2),
            r"its cut\(\) failed: TypeError: expected a GivenPrompt with token ids, got Given",
        ),
        (
            lambda parts: parts.read_prompt({"letters": "ab"}, None).cut(3),
            r"its cut\(\) failed: ValueError: expected at most 3 token ids, got 4",
        ),
    ],
)
def test_a_fault_in_reading_ends_the_request_and_is_recorded(call, fault):
    parts, recorded = parts_of(Letters), []
    parts.report_to(lambda *found: recorded.append(found))
    with pytest.raises(RequestError, match=f"^plugin 'letters' .*: {fault}"):
        call(parts)
    assert [part for part, _, _ in recorded] == ["letters"]


def test_two_parts_with_the_same_key_are_refused_and_closed():
    DONE.clear()
    words = "plugin 'letters' .* and plugin 'other_letters' .* both read prompts with 'letters'"
    with pytest.raises(PluginConflictError, match=words):
        parts_of(Letters, OtherLetters)
    assert sorted(DONE) == ["letters", "other_letters"]


def test_media_are_read_by_the_part_that_places_them():
    parts, recorded = parts_of(Reading, disable=["encoders"]), []
    parts.report_to(lambda *fault: recorded.append(fault))
    assert parts.media_tokens == {"image": (7,)}
    assert parts.read_media("image", [("x", "a"), ("y", "b")]) == ["image a", "image b"]
    for error in (RequestError("x: expected an image"), HardpointError("no process")):
        with pytest.raises(type(error), match=f"^{error}$"):
            parts.read_media("image", [("x", error)])
    assert recorded == []
    with pytest.raises(
        RequestError, match=r"'reading' .*: its read_media\(\) failed: KeyError: 3$"
    ):
        parts.read_media("image", [("x", KeyError(3))])
    with pytest.raises(
        RequestError, match=r"failed: TypeError: expected 1 items, got \['a', 'b'\]"
    ):
        parts.read_media("image", [("x", ["a", "b"])])
    assert [name for name, _, _ in recorded] == ["reading", "reading"]


def test_a_part_that_reads_no_media_gets_them_as_they_were_given():
    parts = parts_of(Placing, disable=["encoders"])
    assert parts.read_media("image", [("x", "a"), ("y", b"b")]) == ["a", b"b"]


class Shouting(OutputReader):
    """Changes contents to capitals; its part marks them so."""

    special = (7,)

    def complete(self, completion, *, finished):
        completion.content = completion.text.upper()


class ShoutedFormat(OutputFormat):
    def __init__(self, reader):
        self.reader = reader

    def open(self, request):
        return self.reader() if callable(self.reader) else self.reader

    def close(self):
        DONE.append("format")


class Shouts(Labels):
    contract = 1
    reader = Shouting

    def frontend_half(self, context):
        half = Half(self.name, context)
        return type("ShoutsHalf", (Half,), {"output_format": self.made})(half.name, context)

    def made(self, request, calls):
        return ShoutedFormat(self.reader)


class OpensText(Shouts):
    contract = 1
    reader = "text"


class Mute(Shouting):
    def complete(self, completion, *, finished):
        raise OSError("lost it")

    def result(self, output):
        return "text"


class Mutes(Shouts):
    contract = 1
    reader = Mute


class MadeOfText(Shouts):
    contract = 1

    def made(self, request, calls):
        return "text"


def test_formats_are_closed_with_their_last_holder():
    parts, shown = parts_of(Shouts), CompletionOutput(index=0, text="a", token_ids=[1])
    formats = parts.output_formats(request(), None)
    (reader,) = formats.hold().open(request())
    reader.complete(shown, finished=True)
    assert (shown.content, reader.special, reader.has_calls) == ("A", (7,), False)
    formats.close()
    assert "format" not in DONE
    formats.close()
    assert DONE.count("format") == 1
    DONE.clear()


def test_a_request_of_which_no_part_has_a_format_has_none():
    parts = parts_of(Labels)
    assert parts.output_formats(request(), None) is None


class ShoutsTagged(Shouts):
    contract = 1

    def frontend_half(self, context):
        half = super().frontend_half(context)
        half.for_fields = ("tags",)
        return half


def test_a_declaration_selects_the_requests_that_get_a_format():
    parts, tagged = parts_of(ShoutsTagged), request()
    assert parts.output_formats(request(), None) is None
    tagged.tags = {"tenant": "acme"}
    assert parts.output_formats(tagged, None) is not None
    tools = RequestedCalls(tools={"search": {}})
    assert parts.output_formats(request(), tools) is not None


def test_a_fault_of_a_format_refuses_the_request_and_names_the_part():
    parts, faults = parts_of(MadeOfText), []
    parts.report_to(lambda *fault: faults.append(fault))
    with pytest.raises(RequestError, match=r"its output_format\(\) failed: TypeError: expected an"):
        parts.output_formats(request(), None)
    ((name, request_id, _),) = faults
    assert (name, request_id) == ("made_of_text", "r")


@pytest.mark.parametrize(
    ("part", "call", "words"),
    [
        (OpensText, None, r"its open\(\) failed: TypeError: expected an OutputReader or None"),
        (Mutes, "complete", r"its complete\(\) failed: OSError: lost it"),
        (Mutes, "result", r"its result\(\) failed: TypeError: expected an output or None"),
    ],
)
def test_a_fault_of_a_reader_names_its_part(part, call, words):
    formats = parts_of(part).output_formats(request(), None)
    shown = CompletionOutput(index=0, text="a", token_ids=[1])
    with pytest.raises(PluginFaultError, match=words) as fault:  # noqa: PT012
        (reader,) = formats.open(request())
        if call == "complete":
            reader.complete(shown, finished=True)
        else:
            reader.result(shown)
    assert fault.value.plugin == {OpensText: "opens_text", Mutes: "mutes"}[part]
