"""Every hook but those of servers, which an example package has."""

import msgspec

from hardpoint.plugins import Command, RequestError, hookimpl


class CompatHooks:
    """Keeps what it was called with; changes and refuses requests by their tags."""

    contract = 1

    @hookimpl
    def engine_started(self, info):
        assert set(info) >= {"model", "dtype", "max_model_len", "num_blocks", "load_seconds"}
        SEEN.append("engine_started")

    @hookimpl
    def engine_closing(self):
        SEEN.append("engine_closing")

    @hookimpl
    def step_planned(self, record):
        assert sum(record.scheduled.values()) <= record.token_budget
        SEEN.append("step_planned")

    @hookimpl
    def request_received(self, request):
        if request.params.seed == 13:
            raise ValueError("seed: 13 is not for us")
        if request.params.seed == 14:
            raise RequestError("seed: 14 is not for us either")
        if request.params.seed == 15:
            request.params = msgspec.structs.replace(request.params, max_tokens=3)
        SEEN.append("request_received")

    @hookimpl
    def request_finished(self, output):
        assert output.finished
        SEEN.append("request_finished")

    @hookimpl
    def cli_commands(self):
        def configure(parser):
            parser.add_argument("word")

        def run(options, context):
            config, _ = context.load_config()
            print(f"{options.word} from {config.model} with {bool(context.version)}")
            return 3

        return [Command("compat", "Say a word.", configure, run)]


SEEN = []
