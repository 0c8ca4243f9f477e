"""Formats of calls with a tag for each parameter: rows for `tag_calls`."""

# ruff: noqa: RUF001, RUF002 - the markers of DeepSeek and Step are written so

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hardpoint.plugins.output_parser import OutputEvent
from hardpoint.plugins.structured import Format, OptionalFormat, RegexFormat
from hardpoint.toolkit.parsing.format_parser import (
    Between,
    Content,
    Kind,
    ParserState,
    ToolName,
    any_tag,
    choice_of_calls,
)

from .tag_calls import (
    After,
    Key,
    Parameters,
    StrayEnd,
    TagCalls,
    Tags,
    Value,
    begin_call,
    either,
)
from .values import parameters_of


class Qwen3Coder(TagCalls):
    """Qwen3-Coder: calls with a tag for each parameter.

    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. A value is
    text if the tool's schema requires it, otherwise JSON if it is valid. It ends at
    `</parameter>`, or at a line that begins with `<parameter=` or `</function>`. A call without
    `<tool_call>`, as the model sometimes writes, begins at `<function=`.
    """

    contract = 2
    roles = ("tools",)
    other_names = ("qwen3_xml", "mimo", "step3p5")
    template_marks = ("<tool_call>", "<function=", "<parameter=")
    sections = {"<tool_call>": "</tool_call>"}
    one_each = True
    tags = Tags(around="\n")

    def states(self) -> Mapping[str, ParserState]:
        """Return content and the parts of a call."""
        content = {"<tool_call>": "call", "<function=": "name"}
        return {"content": ParserState(Content, content), **self.call_states(content)}

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it.

        Parameters are in the order of the schema.
        """
        calls = super().call_format(tools, required=required, parallel=parallel)
        if required:
            return calls
        alone = self.tagged(
            "<function=",
            choice_of_calls(tools, lambda tool, schema: self.call(tool, schema, is_alone=True)),
            required=False,
            parallel=parallel,
        )
        return any_tag(calls, alone, parallel=parallel)


class SeedOss(TagCalls):
    """Seed-OSS: reasoning in `<seed:think>`, calls in `<seed:tool_call>` as in `qwen3_coder`."""

    contract = 2
    roles = ("reasoning", "tools")
    template_marks = ("<seed:tool_call>",)
    reasoning = "thinking"
    sections = {"<seed:tool_call>": "</seed:tool_call>"}
    one_each = True
    thinking = ("<seed:think>", "</seed:think>")
    tags = Tags()


class MiniMaxM2(TagCalls):
    """MiniMax-M2: a section of calls, with a tag for each parameter.

    A call is `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, the section
    `<minimax:tool_call>...</minimax:tool_call>`.

    A value is text if the schema of the tool requires it, else JSON if it is valid. It ends at
    `</parameter>`, or at a line that begins with `<parameter name=` or `</invoke>`. Its
    reasoning parser is `think_tags`.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<minimax:tool_call>", "<invoke name=")
    sections = {"<minimax:tool_call>": "</minimax:tool_call>"}
    tags = Tags(name="<invoke name=", end="</invoke>", key="<parameter name=", quote='"')


class DeepSeekV32(TagCalls):
    """DeepSeek-V3.2 and V4: a section of calls; tags state which values are text.

    A call is `<｜DSML｜invoke name="NAME">`, then for each parameter
    `<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>`. A value with
    `string="false"` is JSON. The section is `<｜DSML｜function_calls>`, of V4
    `<｜DSML｜tool_calls>`.

    The model has no Jinja chat template, so `auto` does not select the parser: name it. The
    value of a parameter is complete before it is returned.
    """

    contract = 2
    roles = ("tools",)
    other_names = ("deepseek_v32", "deepseek_v4")
    template_marks = ("｜DSML｜",)
    sections = {
        f"<｜DSML｜{name}>": f"</｜DSML｜{name}>" for name in ("function_calls", "tool_calls")
    }
    tags = Tags(
        name="<｜DSML｜invoke name=",
        end="</｜DSML｜invoke>",
        key="<｜DSML｜parameter name=",
        value_end="</｜DSML｜parameter>",
        quote='"',
        marks=(' string="true"', ' string="false"'),
    )


class Step3(TagCalls):
    """Step3: a section of calls, each between tokens, with a tag for each parameter.

    A call is `<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">`, then
    `<steptml:parameter name="KEY">VALUE</steptml:parameter>` for each parameter, and
    `</steptml:invoke><｜tool_call_end｜>`. The section begins with `<｜tool_calls_begin｜>`.

    Its reasoning parser is `think_tags`. Step 3.5 writes the calls of `qwen3_coder`.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<｜tool_calls_begin｜>", "<steptml:invoke")
    sections = {"<｜tool_calls_begin｜>": "<｜tool_calls_end｜>"}
    tags = Tags(
        name="<steptml:invoke name=",
        end="</steptml:invoke>",
        key="<steptml:parameter name=",
        value_end="</steptml:parameter>",
        quote='"',
        before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        after="<｜tool_call_end｜>\n",
    )

    def call_states(self, content: Mapping[str, str]) -> dict[str, ParserState]:
        """Return the states of `TagCalls`, with the tokens around a call."""
        states = super().call_states(content)
        call, end = states["call"], states["end"]
        return {
            **states,
            "call": ParserState(Between, {**call.moves, "<｜tool_call_begin｜>": "kind"}),
            "kind": ParserState(Kind, {**call.moves, "<｜tool_sep｜>": "call"}),
            "end": ParserState(end.body, {**end.moves, "<｜tool_call_end｜>": "call"}),
        }


class Glm45(TagCalls):
    """GLM-4.5 and later: a call is its name, and tags for the name and the value of each parameter.

    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, up to GLM-4.6
    with a line's end behind the name and each tag.

    A value is text if the schema of the tool requires it, else JSON if it is valid. Its
    reasoning parser is `think_tags`.
    """

    contract = 2
    roles = ("tools",)
    other_names = ("glm47",)
    template_marks = ("<tool_call>", "<arg_key>", "<arg_value>")
    sections = {"<tool_call>": "</tool_call>"}
    one_each = True
    tags = Tags(name="", end="", key="", value_end="</arg_value>", before_calls="")

    def call_states(self, content: Mapping[str, str]) -> dict[str, ParserState]:
        """Return the states of a call, and of the content behind it."""
        parameters = {"<arg_key>": "key", "</tool_call>": "end"}
        after_call = {**content, self.tags.value_end: "stray"}
        return {
            "call": ParserState(_GlmName, parameters),
            "parameters": ParserState(Parameters, parameters),
            "key": ParserState(_GlmKey, {"</arg_key>": "before"}),
            "before": ParserState(Parameters, {"<arg_value>": "value"}),
            "value": ParserState(Value, {"</arg_value>": "parameters"}),
            "end": ParserState(After, after_call),
            "stray": ParserState(partial(StrayEnd, tag=self.tags.value_end), after_call),
        }

    def call(self, tool: str, schema: Mapping[str, Any], *, is_alone: bool = False) -> Format:  # noqa: ARG002
        """Return the grammar of a call, with line ends or without them."""
        line = RegexFormat(pattern="\\n?")
        elements: list[str | Format] = [tool, line]
        for parameter in parameters_of(tool, schema):
            self.check_key(tool, parameter.name)
            values = either([value for _, value in self.values(tool, parameter, schema)])
            argument = self.sequence(
                f"<arg_key>{parameter.name}</arg_key>", line, "<arg_value>", values, line
            )
            elements.append(argument if parameter.is_required else OptionalFormat(content=argument))
        return self.sequence(*elements)


class _GlmName(ToolName):
    """The name of the tool; without parameters, the call begins and ends behind it."""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        super().close(events, cut=cut)
        if self.output.target == "end" and not self.output.failed:
            begin_call(self.output, events)


class _GlmKey(Key):
    """The name of a parameter; the call begins with the first one."""

    def open(self, events: list[OutputEvent]) -> None:
        if not self.output.in_call:
            begin_call(self.output, events)

    def parse(self, text: str) -> tuple[str, bool | None]:
        return text.strip(), None
