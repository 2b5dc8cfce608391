"""What every endpoint of the embedded server does with bodies and answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from aiohttp import web

from megarl.errors import MegarlError
from megarl.rollout.wire import BadRequest
from megarl.types import TensorSpec

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = dict[str, Any]


async def control(
    operation: Future[Any] | Awaitable[Any],
    message: str,
    *,
    result_as: str | None = None,
    **more: Any,
) -> web.Response:
    """SGLang's answer to a control operation, good or bad."""
    try:
        result = await (result_of(operation) if isinstance(operation, Future) else operation)
    except MegarlError as error:
        return web.json_response({"success": False, "message": str(error)}, status=400)
    extra = {result_as: result} if result_as else {}
    return web.json_response({"success": True, "message": message, **more, **extra})


async def result_of(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


async def read_json(request: web.Request) -> Body:
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


def field(
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


def specs_in(body: Mapping[str, Any]) -> list[TensorSpec]:
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
