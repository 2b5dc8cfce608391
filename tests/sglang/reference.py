"""What transformers makes of the same tokens, in a process of its own.

A separate process because patches that let Megatron run on CPU corrupt models which transformers
loads beside them. Reads a request per line, answers with a line:

    {"model": FOLDER, "tokens": [ids, L]}
    {"logprobs": [L-1], "routing": [L-1, MoE layers, K],     expert ids by descending score
     "probabilities": [L, V]}                                of the token that follows each
"""

import functools
import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


@functools.cache
def load(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def answer(model: str, tokens: list[int]) -> dict[str, list]:
    ids = torch.tensor([tokens])
    network = load(model)
    output = network(ids, output_router_logits=True)
    every = output.logits[0].log_softmax(-1)
    logprobs = every[:-1].gather(1, ids[0, 1:, None])[:, 0]
    top_k = network.config.num_experts_per_tok
    routing = [layer.topk(top_k).indices[:-1] for layer in output.router_logits]
    return {
        "logprobs": logprobs.tolist(),
        "routing": torch.stack(routing, 1).tolist(),
        "probabilities": every.double().exp().tolist(),
    }


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
