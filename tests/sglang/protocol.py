"""The requests of SGLang's protocol that tests make: sampling, and the trainer's side of a push."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from megarl.ops import digest
from megarl.sync.group import create_store, join_group, leave_group
from megarl.sync.stream import flatten, specs_of
from tests.sglang.server import Endpoint
from tests.sync.bucketing import bucketize

PROMPT = [4, 11, 7, 19, 3, 8, 22, 5, 14, 9, 6]
GROUP = "weights"


def ok(server: Endpoint, path: str, **body: Any) -> Any:
    """The reply to a POST that must succeed."""
    status, reply = server.post(path, body)
    assert status == 200, (path, reply)
    return reply


def sampling(num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request for `num_tokens` tokens at temperature 1, whatever they are."""
    parameters = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True, **fields}


def generate(server: Endpoint, *, num_tokens: int, **fields: Any) -> dict[str, Any]:
    return ok(server, "/generate", **sampling(num_tokens, **fields))


def prompt_logprobs(server: Endpoint) -> list[float]:
    """Log-probs of PROMPT[1:] under the weights being served."""
    reply = generate(server, num_tokens=1, logprob_start_len=0)
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


@contextlib.contextmanager
def joined_group(
    server: Endpoint, pool: ThreadPoolExecutor, *, num_server_ranks: int
) -> Iterator[dist.ProcessGroup]:
    """This process as rank 0, the server's tensor-parallel ranks from 1 on."""
    store, port = create_store("127.0.0.1")
    world_size = 1 + num_server_ranks
    joining = pool.submit(
        ok,
        server,
        "/init_weights_update_group",
        master_address=store.host,
        master_port=port,
        rank_offset=1,
        world_size=world_size,
        group_name=GROUP,
        backend="gloo",
    )
    group = join_group(
        store, rank=0, world_size=world_size, group_name=GROUP, backend="gloo", timeout_s=60.0
    )
    joining.result()
    yield group
    ok(server, "/destroy_weights_update_group", group_name=GROUP)
    leave_group(group)


def send(
    server: Endpoint,
    group: dist.ProcessGroup,
    pool: ThreadPoolExecutor,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Inside an update: broadcasts the weights in buckets of at most 200 kB."""
    for bucket in bucketize(weights.items(), max_bytes=200_000):
        specs = specs_of(bucket)
        receiving = pool.submit(
            ok,
            server,
            "/update_weights_from_distributed",
            names=[spec.name for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            group_name=GROUP,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        dist.broadcast(flatten(bucket), group_src=0, group=group)
        receiving.result()


def received(server: Endpoint) -> list[dict[str, str]]:
    """What the plugin reports: a digest per name, for each tensor-parallel rank."""
    reply = ok(server, "/weights_checker", action="digest", selector="target")
    told = [rank["checksums"] for rank in reply["ranks"]]
    return [{n: d for n, d in rank.items() if not n.startswith("megarl:")} for rank in told]


def digests(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in weights.items()}
