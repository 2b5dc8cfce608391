"""Routing indices as bytes: what they take, and how fast they become so and back.

The note has the bytes an id of both methods and of zlib over the int32 that servers send.
"""

import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megarl.ops import routing_codec
from opsbench.measure import Row, best_times


def rows(quick: bool) -> Iterator[Row]:
    tokens = 200 if quick else 4096
    for experts, topk in ((128, 8), (512, 10)):
        for name, skew in (("uniform", 0.0), ("skewed", 1.0), ("strongly skewed", 2.0)):
            yield measured(name, routing(tokens, 16, topk, experts, skew), experts)


def routing(tokens: int, layers: int, topk: int, experts: int, skew: float) -> NDArray[np.int32]:
    """``skew``: of the experts' log-popularity, the standard deviation in every layer; the topic of
    some hundred tokens has half of it.
    """
    rng = np.random.default_rng(0)
    out = np.empty((tokens, layers, topk), np.int32)
    for layer in range(layers):
        popular = skew * rng.standard_normal(experts)
        topics = 0.5 * skew * rng.standard_normal((tokens // 256 + 1, experts))
        scores = popular + np.repeat(topics, 256, 0)[:tokens] + rng.gumbel(size=(tokens, experts))
        out[:, layer] = np.argsort(-scores, 1)[:, :topk]
    return out


def measured(name: str, ids: NDArray[np.int32], experts: int) -> Row:
    bits = routing_codec.encode(ids, experts)
    files = routing_codec.encode(ids, experts, deflate=True)
    narrow, width = routing_codec.narrow(ids, experts), (experts - 1).bit_length()

    def reference() -> None:
        routing_codec.find_bad_id_ref(ids, experts)
        packed = routing_codec.pack_ids_ref(narrow, width)
        back = routing_codec.unpack_ids_ref(packed, width, ids.shape, narrow.dtype)
        routing_codec.find_bad_id_ref(back, experts)

    calls = {
        "ours": lambda: routing_codec.decode(routing_codec.encode(ids, experts)),
        "files": lambda: routing_codec.decode(routing_codec.encode(ids, experts, deflate=True)),
        "reference": reference,
        "zlib of int32": lambda: zlib.decompress(zlib.compress(ids.tobytes())),
    }
    seconds = best_times(calls, 5, budget_s=2.0)
    plain = len(zlib.compress(ids.tobytes()))
    note = f"{len(bits) / ids.size:.3f} bytes an id, in files {len(files) / ids.size:.3f}, "
    note += f"zlib of int32 {plain / ids.size:.3f}; "
    note += f"{ids.size / seconds['ours'] / 1e6:.0f} M ids/s there and back, files "
    note += f"{ids.size / seconds['files'] / 1e6:.0f}, zlib of int32 "
    note += f"{ids.size / seconds['zlib of int32'] / 1e6:.0f}"
    return Row(
        "routing_codec",
        f"{experts} experts, {name}",
        len(ids),
        1,
        vs_reference=seconds["reference"] / seconds["ours"],
        seconds=seconds["ours"],
        note=note,
    )
