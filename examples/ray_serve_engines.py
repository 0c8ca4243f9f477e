"""A server on Ray Serve, with as many engines as there is work for.

    ray start --head
    python ray_serve_engines.py MODEL "The capital of France is"

It deploys the application, asks it over HTTP, and deletes it. See docs/ray.md.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from ray import serve

from hardpoint.ray_serve import app

NAME = "hardpoint-example"


def complete(url: str, model: str, prompt: str) -> str:
    """Return the completion of a prompt by the server."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    return str(choice["text"])


def main(
    model: str, prompts: list[str], url: str = "http://127.0.0.1:8000", **args: Any
) -> list[str]:
    """Complete prompts with one to two engines of Serve; `args` are the application's."""
    settings = {"model": model, "min_engines": 1, "max_engines": 2, **args}
    serve.run(app(settings), name=NAME, route_prefix="/")
    try:
        texts = [complete(url, model, prompt) for prompt in prompts]
    finally:
        serve.delete(NAME)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")
    return texts


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
