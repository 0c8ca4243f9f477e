"""An output parser with states of its own, and one by a table of markers."""

from hardpoint import plugins
from hardpoint.plugins import OutputParser, ReasoningMarkers
from hardpoint.plugins.output_format import Content, FormatParser, State
from hardpoint.plugins.output_json import JsonCalls
from hardpoint.plugins.output_parser import ContentText, ReasoningText


class CompatBrackets(OutputParser):
    """Reasoning in double brackets."""

    contract = 1
    roles = ("reasoning",)
    template_marks = ("[[reason]]",)

    class Options(plugins.Options):
        start: str = "[["
        end: str = "]]"

    class Arguments(plugins.Arguments):
        shout: bool = False

    def markers(self):
        encode = self.context.tokenizer.encode
        start = tuple(encode(self.options.start, add_special_tokens=False))
        end = tuple(encode(self.options.end, add_special_tokens=False))
        return ReasoningMarkers(start=(start,), end=(end,))

    def open(self, request):
        return Brackets(self, "reasoning" in request.roles, request.reasoning_open)


class Brackets:
    """Where an output is, and the text that may begin a marker."""

    def __init__(self, parser, separates, inside):
        self.parser, self.separates, self.inside = parser, separates, inside and separates
        self.held = ""

    @property
    def in_reasoning(self):
        return self.inside

    def feed(self, text):
        if not self.separates:
            return [ContentText(text)]
        self.held += text
        events = []
        while True:
            marker = self.parser.options.end if self.inside else self.parser.options.start
            before, found, after = self.held.partition(marker)
            if not found:
                break
            events += self.events(before)
            self.held, self.inside = after, not self.inside
        sizes = range(min(len(marker), len(self.held) + 1) - 1, 0, -1)
        kept = next((size for size in sizes if self.held.endswith(marker[:size])), 0)
        ready = len(self.held) - kept
        events += self.events(self.held[:ready])
        self.held = self.held[ready:]
        return events

    def feed_token(self, token_id, text):
        assert token_id >= 0
        return self.feed(text)

    def finish(self):
        held, self.held = self.held, ""
        return self.events(held)

    def events(self, text):
        if self.inside and self.parser.arguments.shout:
            text = text.upper()
        kind = ReasoningText if self.inside else ContentText
        return [kind(text)] if text else []


class CompatCalls(FormatParser):
    """Calls of tools as JSON between two tags."""

    contract = 1
    roles = ("tools",)

    def states(self):
        return {
            "content": State(Content, {"<call>": "call"}),
            "call": State(JsonCalls, {"</call>": "content"}),
        }
