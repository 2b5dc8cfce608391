"""Servers are asked together, each in a thread: its control calls block, and may not answer."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megarl.protocols import WeightSink

T = TypeVar("T")


def ask(
    sink: WeightSink, op: str, payload: Mapping[str, Any], timeout_s: float
) -> "Future[dict[str, Any]]":
    """The reply to come; calls block, and servers are asked together."""
    return in_background(sink.control, op, payload, timeout_s)


def in_background(function: Callable[..., T], *args: Any, **options: Any) -> "Future[T]":
    """Its result to come, from a thread that does not hold up the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def failed(future: "Future[Any]") -> bool:
    return future.done() and future.exception() is not None


def refusals(sinks: Sequence[WeightSink], replies: Sequence[Future[Any]]) -> dict[str, str]:
    """What each server said that failed; replies are in their order."""
    pairs = zip(sinks, replies, strict=False)
    return {sink.name: str(reply.exception()) for sink, reply in pairs if failed(reply)}


def first_error(futures: Sequence[Future[Any]]) -> str:
    return next((str(future.exception()) for future in futures if failed(future)), "")
