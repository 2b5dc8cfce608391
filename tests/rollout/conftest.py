"""Tiny models, their plain transformers forward as the reference, and a real server in its own
process."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.rollout import RolloutSection
from megarl.rollout.fleet import ServerDeath, start_fleet
from megarl.rundir import RunDir

VOCAB, EOS, LAYERS, TOP_K, EXPERTS = 24, 1, 3, 2, 8
SLOTS, CONTEXT = 64, 64


def write_tiny_model(folder: Path, seed: int, *, expert_width: int = 40) -> Path:
    """A random Qwen3-MoE: distributions far from uniform, an end token that is not rare."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=expert_width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


class Reference:
    """A model as transformers computes it: one sequence, one forward, nothing cached."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[L - 1]: of tokens[1:], each given what precedes it."""
        logits = self.model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
        chosen = torch.tensor(tokens[1:])[:, None]
        return logits.log_softmax(-1).gather(1, chosen).squeeze(1)

    @torch.no_grad()
    def next_probabilities(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits = self.model(torch.tensor([tokens])).logits[0, -1].double()
        return (logits / temperature).softmax(-1)

    @torch.no_grad()
    def routing(self, tokens: list[int]) -> torch.Tensor:
        """[L, M, K]: what each layer's gate chose."""
        seen: list[torch.Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda m, i, out: seen.append(out[2]))
            for layer in self.model.model.layers
        ]
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.stack(seen, dim=1)

    @torch.no_grad()
    def greedy(self, tokens: list[int], new: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([tokens]), max_new_tokens=new, do_sample=False, eos_token_id=EOS
        )
        return out[0, len(tokens) :].tolist()


@dataclass
class Server:
    url: str
    key: str
    model: Path

    def call(
        self, method: str, path: str, body: object = None, *, key: str | None = None
    ) -> tuple[int, Any]:
        """(status, body): parsed where it is JSON. `body` bytes are sent as they are."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        bearer = {"Authorization": f"Bearer {self.key if key is None else key}"}
        request = urllib.request.Request(self.url + path, raw, bearer, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def post(self, path: str, body: object = None) -> Any:
        """The reply to a call that must succeed."""
        status, reply = self.call("POST", path, {} if body is None else body)
        assert status == 200, (path, status, reply)
        return reply

    def get(self, path: str) -> Any:
        status, reply = self.call("GET", path)
        assert status == 200, (path, status, reply)
        return reply

    def generate(self, prompt: list[int], *, new: int, **fields: Any) -> Any:
        sampling = {"max_new_tokens": new, **fields.pop("sampling", {})}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return self.post("/generate", body | fields)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model_a"), seed=0)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model_b"), seed=1)


@pytest.fixture(scope="session")
def reference_a(model_a: Path) -> Reference:
    return Reference(model_a)


@pytest.fixture(scope="session")
def reference_b(model_b: Path) -> Reference:
    return Reference(model_b)


def server_section(**changes: Any) -> RolloutSection:
    base: dict[str, Any] = {"max_running": SLOTS, "context_length": CONTEXT}
    return RolloutSection(**(base | changes))


@pytest.fixture(scope="session")
def session_server(model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    deaths: list[ServerDeath] = []
    fleet = start_fleet(
        server_section(probe_every_s=3600),  # tests count what runs, and a probe is a request
        run_dir=RunDir(tmp_path_factory.mktemp("run")),
        model=model_a,
        dtype="fp32",
        on_death=deaths.append,
    )
    yield Server(fleet.urls[0], fleet.key, model_a)
    start = time.monotonic()
    fleet.close()
    assert deaths == [] and time.monotonic() - start < 2  # rollout servers end in two seconds


@pytest.fixture
def server(session_server: Server) -> Iterator[Server]:
    """The session's server, serving model A as version 0, idle; left so again."""
    yield session_server
    state = session_server.get("/server_info")
    session_server.post("/continue_generation") if not state["updating"] else None
    session_server.post("/abort_request", {"abort_all": True})
    if state["weight_version"] != "0" or state["updating"] or state["unusable"]:
        body = {"model_path": str(session_server.model), "weight_version": "0"}
        if state["updating"] and not state["unusable"]:
            session_server.call("POST", "/end_weight_update", {})
        session_server.post("/update_weights_from_disk", body)
        session_server.post("/continue_generation")
