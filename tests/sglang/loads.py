"""SGLang's own loaders under the plugin's eyes, without a server: in SGLang's environment, with the
plugin and `support/` in PYTHONPATH. Reads a request per line, answers with a line:

    {"model": FOLDER, "backend": of attention,
     "ask": {LABEL: [[names, ...] of each call of load_weights, ...]}}
    {LABEL: {"taken": [names], "dropped": [names], "unwritten": [parameters]}, ...}

Every call is given the folder's tensors of these names, and ones of any other. Loads follow each
other in one model.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.plugins import load_plugins


def started(folder: str, port: int, backend: str) -> torch.nn.Module:
    """SGLang's model of a folder on CPU, its weights loaded."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="auto",
        skip_tokenizer_init=True,
        attention_backend=backend,
        sampling_backend="pytorch",
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    config = ModelConfig.from_server_args(arguments)
    if not torch.distributed.is_initialized():
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    return get_model(
        model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
    )


def answer(model: torch.nn.Module, tensors: dict, calls: list[list[str]]) -> dict[str, list[str]]:
    from megarl_sglang_plugin.excuses import dropped
    from megarl_sglang_plugin.proof import unwritten
    from megarl_sglang_plugin.records import Record

    record = Record()
    record.begin(model)
    for names in calls:
        model.load_weights([(n, tensors[n] if n in tensors else torch.ones(3)) for n in names])
    record.end()
    lost = dropped(model, record, None)
    return {
        "taken": sorted(record.taken),
        "dropped": lost,
        "unwritten": unwritten(model, record.written),
    }


def main() -> None:
    torch.set_num_threads(1)
    load_plugins()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints
    for line in sys.stdin:
        request = json.loads(line)
        model = started(request["model"], port, request["backend"])
        tensors = load_file(Path(request["model"]) / "model.safetensors")
        with torch.no_grad():
            told = {k: answer(model, tensors, calls) for k, calls in request["ask"].items()}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
