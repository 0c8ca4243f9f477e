"""Two engines share the work: one computes prompts, the other one generates.

    python split_prefill.py MODEL "The capital of France is" "Once upon a time"

Long prompts then never delay the tokens of others. See docs/kv-connectors.md.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec

from hardpoint import AsyncLLM, EngineDeadError, OverloadedError, RequestOutput, SamplingParams

PREFILL, DECODE = "prefill", "decode"


def engine_config(name: str, sockets: str) -> dict[str, Any]:
    """Return the configuration of one of two engines that exchange blocks of the KV cache."""
    return {
        "kv_connector": {"engine_id": name, "stores": ["p2p"]},
        "plugin": {
            "p2p": {
                "listen": f"ipc://{sockets}/{name}.sock",
                "peers": {peer: f"ipc://{sockets}/{peer}.sock" for peer in (PREFILL, DECODE)},
                "size_bytes": 256 << 20,
            }
        },
    }


async def last_output(
    engine: AsyncLLM, prompt: str, params: SamplingParams, transfer: Mapping[str, Any] | None
) -> RequestOutput:
    """Return the last output of a request."""
    async for output in engine.generate(prompt, params, kv_transfer_params=transfer):
        last = output
    return last


async def compute(engine: AsyncLLM, prompt: str, params: SamplingParams) -> dict[str, Any] | None:
    """Let an engine compute a prompt; return the parameters with which another one goes on."""
    first = msgspec.structs.replace(params, max_tokens=1, min_tokens=0, stop=[])
    try:
        output = await last_output(engine, prompt, first, {"do_remote_decode": True})
    except (EngineDeadError, OverloadedError):
        return None  # the other engine computes the prompt itself
    return output.kv_transfer_params


async def answer(
    prefill: AsyncLLM, decode: AsyncLLM, prompt: str, params: SamplingParams
) -> RequestOutput:
    """Complete a prompt: one engine computes its beginning and the other one the rest."""
    return await last_output(decode, prompt, params, await compute(prefill, prompt, params))


async def main(model: str, prompts: list[str], **config: Any) -> list[RequestOutput]:
    """Complete prompts with two engines on this machine."""
    with tempfile.TemporaryDirectory() as sockets:  # of this user only
        engines = [
            AsyncLLM(model, config={**config, **engine_config(name, sockets)})
            for name in (PREFILL, DECODE)
        ]
        async with engines[0] as prefill, engines[1] as decode:
            params = SamplingParams(max_tokens=32, temperature=0.0)
            tasks = [answer(prefill, decode, prompt, params) for prompt in prompts]
            outputs = await asyncio.gather(*tasks)
    for output in outputs:
        loaded = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens"
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({loaded} from the other engine)")
    return outputs


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
