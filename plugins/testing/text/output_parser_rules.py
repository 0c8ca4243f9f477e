"""The rules for output parsers."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

SPLITS = Rule(
    "splits: the events of an output do not depend on how its text is cut",
    "hold back the end of a piece that may begin a marker, and nothing else",
)
SAMPLES = Rule(
    "samples: each sample has the reasoning, content and calls that it states",
    "compare the result with the expectation of the sample: is it the parser or the sample?",
)
ANY_TEXT = Rule(
    "any text: a parser takes every text, and gives events only",
    "malformed text is MalformedText; nothing may raise",
)
INDEPENDENT = Rule(
    "independent: two outputs share nothing",
    "keep the data of an output in its state, and nothing in the parser",
)
CALLS = Rule(
    "calls: a call begins, has arguments, and ends; complete arguments are a JSON object",
    "give ToolCallEnd only after ToolCallBegin and the whole arguments, and MalformedText where "
    "a call cannot go on",
)
CUTS = Rule(
    "cuts: a truncated output gives the beginning of the whole one's parts",
    "return only parts that no further text can change; an open part at the end is text, or "
    "malformed",
)
TOKENS = Rule(
    "tokens: only a special token is its marker, and never a text like it",
    "look for a marker that is in the tokenizer's special_tokens by its id, in feed_token",
)
MARKERS = Rule(
    "markers: reasoning begins and ends at the token ids that markers() returns",
    "return every sequence that leads to reasoning and from it, and as `calls` every token that "
    "ends it where the request has tools; grammars and thinking budgets go by them",
)
ROLES = Rule(
    "roles: if one role is on, the parts of the other are content",
    "give events of the roles in ParserRequest.roles alone",
)
CALL_FORMAT = Rule(
    "call format: call_format returns a grammar of the calls of any tools, or the parser has none",
    "return a Format of hardpoint.plugins.structured, with markers as `FormatParser.sequence` has "
    "them; a parser without one leaves call_format out",
)
LINEAR = Rule(
    "linear: a character takes the same time, however long the output is",
    "look at every character once: no search from the beginning, no growing string that is copied",
)
