"""Engines on the nodes of a Ray cluster, behind one LLM: more, and fewer, while it runs.

    ray start --head
    python engines_on_ray.py MODEL "The capital of France is" "Once upon a time"

It runs on a node of the cluster that RAY_ADDRESS names, else of this machine's. See docs/ray.md.
"""

from __future__ import annotations

import sys
from typing import Any

from hardpoint import LLM, RequestOutput, SamplingParams


def main(model: str, prompts: list[str], **config: Any) -> list[list[RequestOutput]]:
    """Complete prompts with two engines, with three, and with one; return the outputs of each."""
    settings = {
        "model": model,
        "parallel": {"data": 2, "ray": {"num_cpus": 1}},
        "engine": {"restart": "on_failure"},  # another one takes the place of one that is lost
    }
    params = SamplingParams(max_tokens=32, temperature=0.0)
    with LLM(config={**config, **settings}) as llm:
        results = [llm.generate(prompts, params)]
        for count in (3, 1):
            llm.engines.scale(count)
            print(f"engines: {', '.join(str(engine.rank) for engine in llm.engines)}")
            results.append(llm.generate(prompts, params))
    for output in results[-1]:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    return results


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
