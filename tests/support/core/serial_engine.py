"""An engine that runs one request at a time and lets three wait."""

from __future__ import annotations

from hardpoint import SamplingParams
from hardpoint.plugins import hookimpl
from hardpoint.testing import scripted_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Grows:
    """Makes prompts too long, as a hook may that does not look."""

    contract = 1

    @hookimpl
    def request_received(self, request):
        if "grow" in request.tags:
            request.prompt_token_ids = [1] * 600


def slowed(plugin_args: dict, max_tokens: int = 400) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, plugin_args=plugin_args
    )


def config(folder, *, in_process=False, **engine):
    return scripted_config(
        folder,
        {
            "engine": {"in_process": in_process, **engine},
            "plugins": {"enable": ["support.plugins.slow:Slow", f"{__name__}:Grows"]},
            "scheduler": {"max_num_seqs": 1, "max_waiting": 3},
        },
    )


def text(output) -> str:
    return output.outputs[0].text


def still_serves(llm) -> bool:
    return text(llm.generate("say abc", GREEDY)[0]) == " abc abc abc"
