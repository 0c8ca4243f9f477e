"""Hooks with one mistake each."""

from __future__ import annotations

import time

import msgspec

from hardpoint.plugins import Command, hookimpl


class NoContract:
    @hookimpl
    def engine_closing(self):
        pass


class UnknownHook:
    contract = 1

    @hookimpl
    def request_ended(self, output):
        pass


class UnknownArgument:
    contract = 1

    @hookimpl
    def request_finished(self, result):
        pass


class Unmarked:
    contract = 1

    @hookimpl
    def engine_closing(self):
        pass

    def request_finished(self, output):
        pass


class Asynchronous:
    contract = 1

    @hookimpl
    async def engine_closing(self):
        pass


class NeedsTokens:
    contract = 1

    @hookimpl
    def request_finished(self, output):
        self.last = output.outputs[0].token_ids[-1]


class NeedsTags:
    contract = 1

    @hookimpl
    def request_received(self, request):
        request.priority = len(request.tags["tenant"])


class ChangesRecord:
    contract = 1

    @hookimpl
    def step_planned(self, record):
        record.scheduled["r-9"] = 1


class ChangesInfo:
    contract = 1

    @hookimpl
    def engine_started(self, info):
        dict.__setitem__(info, "model", "mine")


class RenamesRequest:
    contract = 1

    @hookimpl
    def request_received(self, request):
        request.request_id += "!"


class WrongValue:
    contract = 1

    @hookimpl
    def request_received(self, request):
        request.params = msgspec.structs.replace(request.params, max_tokens=-5)


class EmptiesPrompt:
    contract = 1

    @hookimpl
    def request_received(self, request):
        request.prompt_token_ids.clear()


class Counts:
    contract = 1
    count = 0

    @hookimpl
    def request_received(self, request):
        self.count += 1
        request.tags = {"number": str(self.count)}


class ClosesWhatIsOpen:
    contract = 1

    @hookimpl
    def engine_started(self, info):
        self.model = info["model"]

    @hookimpl
    def engine_closing(self):
        del self.model


class Blocks:
    contract = 1

    @hookimpl
    def engine_started(self, info):
        time.sleep(0.5)


class Slow:
    contract = 1

    @hookimpl
    def step_planned(self, record):
        time.sleep(0.005)


def run(options, context):
    return 0


class NoCommands:
    contract = 1

    @hookimpl
    def cli_commands(self):
        return ["hello"]


class Twins:
    contract = 1

    @hookimpl
    def cli_commands(self):
        return [Command("one", "Say one.", lambda parser: None, run)] * 2


class Right:
    """Correct: changes, refuses and counts."""

    contract = 1

    def __init__(self):
        self.finished = 0

    @hookimpl
    def request_received(self, request):
        if request.timeout:
            raise ValueError("timeout: not here")
        request.tags = {**request.tags, "seen": "yes"}
        request.prompt_token_ids = [2, *request.prompt_token_ids]

    @hookimpl
    def request_finished(self, output):
        self.finished += len(output.outputs)

    @hookimpl
    def step_planned(self, record):
        self.step = record.step
