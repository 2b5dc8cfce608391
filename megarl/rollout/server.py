"""The HTTP face of the embedded engine: the part of SGLang 0.5.23's API that a trainer uses.

Status codes and shapes are SGLang's: `/generate` and unknown bodies answer `{"error": ...}` or
`{"object": "error", "message": ...}`, control operations `{"success": bool, "message": str}` with
400 when refused. Differences, on purpose: every call needs the key, health checks too; a body is
JSON or nothing (there is no pickle and hence no `/update_weights_from_tensor`); weights arrive
whole or the server answers 503, with the reason, until they do; `/weights_checker` knows `digest`.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from megarl import __version__
from megarl.errors import MegarlError
from megarl.rollout.embedded import PAUSE_MODES, Engine, Unusable
from megarl.rollout.wire import BadRequest, format_reply, parse_generate
from megarl.types import TensorSpec

log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = dict[str, Any]

MAX_BODY_BYTES = 64 * 2**20
HEALTH_TIMEOUT_S = 20.0
_LOAD_FORMATS = (None, "flattened_bucket")


def build_app(engine: Engine, key: str) -> web.Application:
    """The application; `key` is what callers send as `Authorization: Bearer KEY`."""
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_errors, _authorisation(key)]
    )
    api = _Api(engine)
    gets = {
        "/health": api.health,
        "/health_generate": api.health_generate,
        "/model_info": api.model_info,
        "/get_model_info": api.model_info,
        "/server_info": api.server_info,
        "/get_server_info": api.server_info,
        "/flush_cache": api.flush_cache,
        "/weights_checker": api.weights_checker,
    }
    posts = {
        "/generate": api.generate,
        "/pause_generation": api.pause_generation,
        "/continue_generation": api.continue_generation,
        "/abort_request": api.abort_request,
        "/flush_cache": api.flush_cache,
        "/begin_weight_update": api.begin_weight_update,
        "/end_weight_update": api.end_weight_update,
        "/init_weights_update_group": api.init_weights_update_group,
        "/destroy_weights_update_group": api.destroy_weights_update_group,
        "/update_weights_from_distributed": api.update_weights_from_distributed,
        "/update_weights_from_disk": api.update_weights_from_disk,
        "/update_weight_version": api.update_weight_version,
        "/weights_checker": api.weights_checker,
    }
    app.add_routes([web.get(path, handler) for path, handler in gets.items()])
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    return app


async def run_app(
    app: web.Application,
    listener: socket.socket,
    started: Callable[[], None],
    stop: asyncio.Event,
    stopping: Callable[[], None],
) -> None:
    """Answers on `listener` until `stop` is set, then calls `stopping` and soon closes."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    started()
    await stop.wait()
    stopping()
    await runner.cleanup()


class _Api:
    """One method an endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._boot = uuid.uuid4().hex  # this process, to whoever asks again later

    # ---- generation ----------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.Response:
        try:
            body = await _json(request)
            requests, batch = parse_generate(body, self._engine.limits)
        except BadRequest as error:
            return _generate_error(str(error), 400)
        try:
            results = await _wait(self._engine.submit(requests))
        except asyncio.CancelledError:  # the caller hung up
            self._engine.abort([r.rid for r in requests])
            raise
        except BadRequest as error:
            return _generate_error(str(error), 400)
        except Unusable as error:
            return _generate_error(str(error), 503)
        except MegarlError as error:
            return _generate_error(str(error), 500)
        version = self._engine.version
        replies = [format_reply(q, r, version) for q, r in zip(requests, results, strict=True)]
        return web.json_response(replies if batch else replies[0])

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await _json(request)
        everything = _field(body, "abort_all", bool, False)
        rid = _field(body, "rid", str, "")
        if everything or rid:  # as SGLang: an empty id aborts nothing
            await _wait(self._engine.abort(None if everything else [rid]))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await _json(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest("mode", mode, " or ".join(PAUSE_MODES))
        await _wait(self._engine.pause(mode))
        return web.json_response({"message": "Generation paused.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await _json(request)
        return await _control(self._engine.resume(), "Generation continued.", status="ok")

    # ---- state ---------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine thread lives and has whole weights."""
        good = self._engine.alive and self._engine.unusable is None
        return web.Response(status=200 if good else 503, text=self._engine.unusable or "")

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 after a token has really been generated, or, while generation is held, after the
        engine thread has answered."""
        engine = self._engine
        if engine.unusable is not None:
            return web.Response(status=503, text=engine.unusable)
        probe = {
            "input_ids": [0],
            "rid": f"HEALTH_CHECK_{uuid.uuid4().hex}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        held = engine.paused is not None or engine.updating
        requests, _ = parse_generate(probe, engine.limits)
        waiting: Future[Any] = engine.ping() if held else engine.submit(requests)
        try:
            await asyncio.wait_for(_wait(waiting), HEALTH_TIMEOUT_S)
        except (TimeoutError, MegarlError) as error:
            engine.abort([requests[0].rid])
            return web.Response(status=503, text=str(error) or "the engine does not answer")
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "model_path": str(engine.model.folder),
                "is_generation": True,
                "weight_version": engine.version,
                "model_type": engine.model.config.model_type,
                "architectures": engine.model.module.config.architectures,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        limits = {
            "model_path": str(engine.model.folder),
            "max_running_requests": engine.model.num_slots,
            "context_length": engine.model.context_length,
            "fixed_shape": engine.model.fixed_shape,
            "fp8": engine.model.fp8,
            "engine": "megarl-embedded",
            "version": __version__,
            "boot": self._boot,
        }
        return web.json_response(limits | engine.state())

    async def flush_cache(self, request: web.Request) -> web.Response:
        try:
            await _wait(self._engine.flush())
        except MegarlError as error:
            return web.Response(status=400, text=f"Flush cache failed: {error}\n")
        return web.Response(text="Cache flushed.\n")

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = await _json(request) if request.can_read_body else {}
        action = body.get("action", "checksum")
        if action == "held":
            held = await _wait(self._engine.held())
            return web.json_response({"success": True, "message": "", "digests": held})
        if action not in ("checksum", "digest"):
            raise BadRequest("action", action, "checksum, digest or held")
        digests, seconds = await _wait(self._engine.digests())
        if action == "digest":
            told = {"digests": digests, "digest_seconds": seconds}
            return web.json_response({"success": True, "message": "", **told})
        total = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
        rank = {"checksums": digests, "per_gpu_checksum": total}
        return web.json_response(
            {"success": True, "message": "", "ranks": [rank], "per_engine_checksum": total}
        )

    # ---- weights -------------------------------------------------------------------------------

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        await _json(request)
        return await _control(self._engine.begin_update(), "A weight update is open.")

    async def end_weight_update(self, request: web.Request) -> web.Response:
        version = _field(await _json(request), "weight_version", str, None)
        return await _control(self._engine.end_update(version), "The weight update is complete.")

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await _json(request)
        arguments: dict[str, Any] = {
            "address": _field(body, "master_address", str),
            "port": _field(body, "master_port", int),
            "rank": _field(body, "rank_offset", int),
            "world_size": _field(body, "world_size", int),
            "name": _field(body, "group_name", str, "weight_update_group"),
            "backend": _field(body, "backend", str, "nccl"),
            "timeout_s": _field(body, "timeout_s", (int, float), None),
        }
        # In a thread: joining waits for the other members, and generation goes on meanwhile.
        join = asyncio.to_thread(self._engine.receiver.join_group, **arguments)
        return await _control(join, f"Joined {arguments['name']}.")

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        name = _field(await _json(request), "group_name", str, "weight_update_group")
        leave = asyncio.to_thread(self._engine.receiver.leave_group, name)
        return await _control(leave, f"Left {name}.")

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await _json(request)
        load_format = body.get("load_format")
        if load_format not in _LOAD_FORMATS:
            raise BadRequest("load_format", load_format, "null or flattened_bucket")
        received = self._engine.receive(
            _specs(body),
            group=_field(body, "group_name", str, "weight_update_group"),
            flattened=load_format is not None,
        )
        return await _control(received, "Received.")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await _json(request)
        loaded = self._engine.load_folder(
            Path(_field(body, "model_path", str)),
            _field(body, "weight_version", str, None),
            abort=_field(body, "abort_all_requests", bool, False),
        )
        return await _control(loaded, "Loaded.", result_as="num_paused_requests")

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await _json(request)
        version = _field(body, "new_version", str)
        abort = _field(body, "abort_all_requests", bool, True)
        moved = self._engine.set_version(version, abort=abort)
        return await _control(moved, f"Weight version is {version}.", new_version=version)


async def _control(
    operation: Future[Any] | Awaitable[Any],
    message: str,
    *,
    result_as: str | None = None,
    **more: Any,
) -> web.Response:
    """SGLang's answer to a control operation, good or bad."""
    try:
        result = await (_wait(operation) if isinstance(operation, Future) else operation)
    except MegarlError as error:
        return web.json_response({"success": False, "message": str(error)}, status=400)
    extra = {result_as: result} if result_as else {}
    return web.json_response({"success": True, "message": message, **more, **extra})


async def _wait(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def _json(request: web.Request) -> Body:
    """The body as a JSON object. Raises BadRequest for anything else."""
    raw = await request.read()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", raw[:40], f"a JSON object ({error})") from error
    if not isinstance(body, dict):
        raise BadRequest("body", body, "a JSON object")
    return body


_REQUIRED: Any = object()


def _field(
    body: Mapping[str, Any],
    name: str,
    kind: type | tuple[type, ...],
    default: Any = _REQUIRED,
) -> Any:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise BadRequest(name, value, f"a {names}")
    return value


def _specs(body: Mapping[str, Any]) -> list[TensorSpec]:
    names, dtypes, shapes = (body.get(field) for field in ("names", "dtypes", "shapes"))
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise BadRequest("names", names, "a list of weight names")
    if not isinstance(dtypes, list) or [type(d) for d in dtypes] != [str] * len(names):
        raise BadRequest("dtypes", dtypes, f"a list of {len(names)} dtype names")
    if not isinstance(shapes, list) or len(shapes) != len(names):
        raise BadRequest("shapes", shapes, f"a list of {len(names)} lists of integers")
    for shape in shapes:
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise BadRequest("shapes", shape, "a list of integers, 0 or above")
    return [TensorSpec(n, tuple(s), d) for n, s, d in zip(names, shapes, dtypes, strict=True)]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything that goes wrong becomes an answer in SGLang's shape."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _invalid(str(error), 400, "Bad Request")
    except web.HTTPException as error:
        return _invalid(error.reason, error.status, str(error.status))
    except MegarlError as error:
        return _invalid(str(error), 500, "Internal Server Error")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _invalid("internal error; see the server's log", 500, "Internal Server Error")


def _authorisation(key: str) -> Any:
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        found = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not secrets.compare_digest(found, expected):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


def _generate_error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _invalid(message: str, status: int, kind: str) -> web.Response:
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return web.json_response(body, status=status)
