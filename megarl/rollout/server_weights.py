"""The embedded server's endpoints for weights, and for the memory that they and its cache take:
SGLang's, but for `/update_weights_from_shared_memory`, which is ours. Bodies are JSON; weights are
read from process groups, from memory of this machine and from safetensors.

A caller with the key names what is loaded: a folder (safetensors are read from there, no code is
run), or the memory of another process of this server's user.
"""

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from megarl.rollout.embedded import Engine
from megarl.rollout.embedded_memory import MEMORY
from megarl.rollout.server_bodies import Handler, control, field, read_json, specs_in
from megarl.rollout.wire import BadRequest

_LOAD_FORMATS = (None, "flattened_bucket")


class WeightsApi:
    """One method an endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def posts(self) -> dict[str, Handler]:
        return {
            "/begin_weight_update": self.begin_weight_update,
            "/end_weight_update": self.end_weight_update,
            "/init_weights_update_group": self.init_weights_update_group,
            "/destroy_weights_update_group": self.destroy_weights_update_group,
            "/update_weights_from_distributed": self.update_weights_from_distributed,
            "/update_weights_from_shared_memory": self.update_weights_from_shared_memory,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weight_version": self.update_weight_version,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
        }

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        await read_json(request)
        return await control(self._engine.begin_update(), "A weight update is open.")

    async def end_weight_update(self, request: web.Request) -> web.Response:
        version = field(await read_json(request), "weight_version", str, None)
        return await control(self._engine.end_update(version), "The weight update is complete.")

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        arguments: dict[str, Any] = {
            "address": field(body, "master_address", str),
            "port": field(body, "master_port", int),
            "rank": field(body, "rank_offset", int),
            "world_size": field(body, "world_size", int),
            "name": field(body, "group_name", str, "weight_update_group"),
            "backend": field(body, "backend", str, "nccl"),
            "timeout_s": field(body, "timeout_s", (int, float), None),
        }
        # In a thread: joining waits for the other members, and generation goes on meanwhile.
        join = asyncio.to_thread(self._engine.receiver.join_group, **arguments)
        return await control(join, f"Joined {arguments['name']}.")

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        name = field(await read_json(request), "group_name", str, "weight_update_group")
        leave = asyncio.to_thread(self._engine.receiver.leave_group, name)
        return await control(leave, f"Left {name}.")

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        load_format = body.get("load_format")
        if load_format not in _LOAD_FORMATS:
            raise BadRequest("load_format", load_format, "null or flattened_bucket")
        specs, flattened = specs_in(body), load_format is not None
        group = field(body, "group_name", str, "weight_update_group")
        received = self._engine.update(
            lambda receiver: receiver.receive(specs, group=group, flattened=flattened)
        )
        return await control(received, "Received.")

    async def update_weights_from_shared_memory(self, request: web.Request) -> web.Response:
        """`place`: memory of another process on this machine, which this one may read."""
        body = await read_json(request)
        specs, place = specs_in(body), field(body, "place", dict)
        received = self._engine.update(lambda receiver: receiver.receive_shared(specs, place))
        return await control(received, "Received.")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        loaded = self._engine.load_folder(
            Path(field(body, "model_path", str)),
            field(body, "weight_version", str, None),
            abort=field(body, "abort_all_requests", bool, False),
        )
        return await control(loaded, "Loaded.", result_as="num_paused_requests")

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        version = field(body, "new_version", str)
        abort = field(body, "abort_all_requests", bool, True)
        moved = self._engine.set_version(version, abort=abort)
        return await control(moved, f"Weight version is {version}.", new_version=version)

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        tags = _tags(await read_json(request))
        return await control(self._engine.release(tags), f"Released: {', '.join(sorted(tags))}.")

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        tags = _tags(await read_json(request))
        return await control(self._engine.restore(tags), f"Taken again: {', '.join(sorted(tags))}.")


def _tags(body: dict[str, Any]) -> frozenset[str]:
    """None, or an empty list, means all, as for SGLang."""
    tags = field(body, "tags", list, None) or list(MEMORY)
    if any(tag not in MEMORY for tag in tags):
        raise BadRequest("tags", tags, f"a list of {', '.join(MEMORY)}")
    return frozenset(tags)
