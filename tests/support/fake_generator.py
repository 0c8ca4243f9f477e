"""An open model without an engine, and commands run with it."""

import argparse

from hardpoint.builtin_plugins import commands as builtin_commands
from hardpoint.configuration.catalog import Catalog
from hardpoint.configuration.loading import load_config
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import (
    CommandContext,
    CompletionOutput,
    EngineConfig,
    RequestOutput,
    SamplingParams,
)


class FakeGenerator:
    """Generates a given text, a word at a time, and records its requests."""

    config = EngineConfig(max_model_len=8192)

    def __init__(self, answers):
        self.answers = list(answers)
        self.asked = []
        self.closed = False

    @property
    def model(self):
        return self  # the group has the two methods that follow

    def default_sampling_params(self):
        return SamplingParams()

    def apply_chat_template(self, messages):
        text = "".join(message["content"] for message in messages)
        return {"prompt_token_ids": list(text.encode()), "messages": messages}

    def stream(self, prompt, params=None):
        if isinstance(prompt, dict):
            prompt = prompt["messages"]
        self.asked.append((prompt, params))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        outputs = [p if isinstance(p, RequestOutput) else delta(p) for p in answer]
        yield from outputs
        if not any(output.finished for output in outputs):
            yield delta("", "stop")

    def stream_chat(self, messages, params=None):
        return self.stream([dict(message) for message in messages], params)

    def close(self):
        self.closed = True


def delta(text, finish_reason=None, index=0, **fields):
    fields = {"content": text or None} | fields
    new = CompletionOutput(
        index=index,
        text=text,
        token_ids=[len(text)] if text else [],
        finish_reason=finish_reason,
        **fields,
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1, 2],
        outputs=[new],
        finished=bool(finish_reason),
    )


def run_command(name, arguments, generator=None, **fields):
    """Run a built-in command with a fake model."""
    (command,) = [c for c in builtin_commands.cli_commands() if c.name == name]
    parser = argparse.ArgumentParser(prog=f"hardpoint {name}")
    command.configure(parser)
    context = CommandContext(
        load_config=lambda: load_config(environ={}),
        load_catalog=lambda config, sources: Catalog(
            resolve_plugins(config, sources), config, sources
        ),
        open_model=generator if callable(generator) else lambda config, sources: generator,
        version="9.9",
        **fields,
    )
    return command.run(parser.parse_args(arguments), context)
