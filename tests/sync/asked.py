"""What a server is asked around the pushes of the matrix, by the tests or by their workers."""

import json
import urllib.request
from typing import Any

PROMPT = [4, 11, 7, 19, 3, 8, 22, 5, 14, 9, 6]


def ask(server: dict[str, Any], path: str, **body: Any) -> Any:
    """The reply to a POST that must succeed; ``server``: its ``url`` and ``key``."""
    headers = {"Authorization": f"Bearer {server['key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(server["url"] + path, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return json.load(response)


def checksum_of(server: dict[str, Any]) -> str:
    """SGLang's own, of everything that it computes with, on all its ranks."""
    return str(ask(server, "/weights_checker", action="checksum")["per_engine_checksum"])


def sampled(server: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of PROMPT[1:], the version that says so, and how much of the prompt was ``cached``
    as it came.
    """
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    cached = ask(server, "/generate", **body)["meta_info"]["cached_tokens"]
    meta = ask(server, "/generate", **body, logprob_start_len=0)["meta_info"]
    return {
        "cached": cached,
        "logprobs": [entry[0] for entry in meta["input_token_logprobs"][1:]],
        "version": meta["weight_version"],
    }
