"""The HTTP face of the embedded engine: the part of SGLang 0.5.23's API that a trainer uses.

Status codes and shapes are SGLang's: `/generate` and unknown bodies answer `{"error": ...}` or
`{"object": "error", "message": ...}`, control operations `{"success": bool, "message": str}` with
400 when refused. Differences, on purpose: every call needs the key, health checks too; a body is
JSON or nothing (there is no pickle and hence no `/update_weights_from_tensor`; shared memory has an
endpoint of its own, server_weights.py); weights arrive whole or the server answers 503, with the
reason, until they do; `/weights_checker` knows `digest`.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from megarl import __version__
from megarl.errors import MegarlError
from megarl.rollout.embedded import PAUSE_MODES, Engine, Unusable
from megarl.rollout.server_bodies import Handler, control, field, read_json, result_of
from megarl.rollout.server_weights import WeightsApi
from megarl.rollout.wire import BadRequest, format_reply, parse_generate

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
HEALTH_TIMEOUT_S = 20.0


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
        "/weights_checker": api.weights_checker,
        **WeightsApi(engine).posts(),
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
            body = await read_json(request)
            requests, batch = parse_generate(body, self._engine.limits)
        except BadRequest as error:
            return _generate_error(str(error), 400)
        try:
            results = await result_of(self._engine.submit(requests))
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
        body = await read_json(request)
        everything = field(body, "abort_all", bool, False)
        rid = field(body, "rid", str, "")
        if everything or rid:  # as SGLang: an empty id aborts nothing
            await result_of(self._engine.abort(None if everything else [rid]))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest("mode", mode, " or ".join(PAUSE_MODES))
        await result_of(self._engine.pause(mode))
        return web.json_response({"message": "Generation paused.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await read_json(request)
        return await control(self._engine.resume(), "Generation continued.", status="ok")

    # ---- state ---------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine thread lives and has whole weights."""
        good = self._engine.alive and self._engine.unusable is None
        return web.Response(status=200 if good else 503, text=self._engine.unusable or "")

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 after a token has really been generated, or, while generation is held, after the
        engine thread has answered."""
        engine = self._engine
        if engine.unusable is not None or engine.memory.released:
            return web.Response(status=503, text=engine.unusable or "its memory is released")
        probe = {
            "input_ids": [0],
            "rid": f"HEALTH_CHECK_{uuid.uuid4().hex}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        held = engine.paused is not None or engine.updating
        requests, _ = parse_generate(probe, engine.limits)
        waiting: Future[Any] = engine.ping() if held else engine.submit(requests)
        try:
            await asyncio.wait_for(result_of(waiting), HEALTH_TIMEOUT_S)
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
            await result_of(self._engine.flush())
        except MegarlError as error:
            return web.Response(status=400, text=f"Flush cache failed: {error}\n")
        return web.Response(text="Cache flushed.\n")

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = await read_json(request) if request.can_read_body else {}
        action = body.get("action", "checksum")
        if action == "held":
            held = await result_of(self._engine.held())
            return web.json_response({"success": True, "message": "", "digests": held})
        if action not in ("checksum", "digest"):
            raise BadRequest("action", action, "checksum, digest or held")
        digests, seconds = await result_of(self._engine.digests())
        if action == "digest":
            told = {"digests": digests, "digest_seconds": seconds}
            return web.json_response({"success": True, "message": "", **told})
        total = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
        rank = {"checksums": digests, "per_gpu_checksum": total}
        return web.json_response(
            {"success": True, "message": "", "ranks": [rank], "per_engine_checksum": total}
        )


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
