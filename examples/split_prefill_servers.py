"""Two servers share the work: one computes prompts, the other one generates.

    export HARDPOINT_API_KEY=...   # a key that both servers know, with kv_transfer = true
    python split_prefill_servers.py http://127.0.0.1:8001 http://127.0.0.1:8002 "Once upon a time"

The first server is for prompts. A router in front of many servers does the same with each request.
See docs/kv-connectors.md.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a server to a completion."""
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ['HARDPOINT_API_KEY']}",
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def compute(prefill: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Let a server compute a prompt; return the parameters to go on with, None if it fails."""
    first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    try:
        return post(prefill, first).get("kv_transfer_params")  # none after a timeout, for example
    except urllib.error.HTTPError as error:
        if error.code < 500 and error.code not in {408, 429}:
            raise  # the request is wrong, and would be for the other server
    except (OSError, http.client.HTTPException):
        pass  # it cannot be reached, or has died
    return None


def complete(prefill: str, decode: str, body: dict[str, Any]) -> dict[str, Any]:
    """Complete a prompt with two servers; with the second one alone if the first one fails."""
    transfer = compute(prefill, body)
    return post(decode, body if transfer is None else {**body, "kv_transfer_params": transfer})


if __name__ == "__main__":
    prefill_url, decode_url, prompt = sys.argv[1:]
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0}
    answer = complete(prefill_url, decode_url, body)
    print(answer["choices"][0]["text"])
    print(answer["usage"], file=sys.stderr)
