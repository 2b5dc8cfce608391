"""Handles of a bucket for SGLang's ``/update_weights_from_tensor``, as torch's multiprocessing has
them: of shared memory on CPU, of CUDA IPC on GPU.

SGLang's protocol wants them pickled. This is the one place where megarl makes pickles, and it never
reads any. They hold no more than SGLang's restricted unpickler lets through: the functions that
rebuild torch's shared tensors and, for what SGLang calls metadata, ``types.SimpleNamespace``. They
go to servers on loopback only, with their key.

1. On CPU a bucket lies in memory that torch shares by name ("file_system"): sharing by descriptor,
   torch's default, needs a secret that only child processes have, and ends a server that lacks it.
   The helper process that torch starts for it removes the memory when this process is gone.
2. On GPU every tensor-parallel rank of a server opens the same allocation, over NVLink or PCIe
   where it is another device's. Devices are told by UUID: numbers depend on CUDA_VISIBLE_DEVICES.
3. Each rank gets handles of its own: they are counted, and using one twice would free the memory.
4. A server that is lost may never open what it was told of, and nobody knows whether it did. So on
   CPU the last count is never given back, and the memory's name goes with the buffer, whatever is
   counted. On GPU every handle has a count of its own, which is given back when the server fails.
"""

import base64
import io
import ipaddress
import weakref
from collections.abc import Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.protocols import WeightSink
from megarl.sync.packing import Packed
from megarl.sync.stream import dtype_of, offsets_of

_SHARED = Path("/dev/shm")  # where names of shared memory are files, on Linux
_CUDA_DEVICE = 6  # of the arguments of ``rebuild_cuda_tensor``
_CUDA_COUNT = slice(11, 13)  # likewise: the file that counts are in, and where in it

_Counts = list[tuple[bytes, int]]


class TensorHandles:
    """A ``Handover``. ``device``: of buckets."""

    op = "receive_tensors"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._counts: dict[str, _Counts] = {}  # of what a server was told of last

    def buffer(self, num_bytes: int) -> Tensor:
        if self.device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
        _, name, _ = storage._share_filename_cpu_()
        storage._shared_incref()  # so that no reader that is late removes what is removed already
        weakref.finalize(storage, _unlink, name)
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))

    def refuse(self, sink: WeightSink) -> str:
        try:
            address = sink.local_address
        except OSError as error:
            return str(error)
        if ipaddress.ip_address(address.strip("[]")).is_loopback:
            return ""
        return (
            f"sync.transport=colocated: {sink.name} is not on loopback (reached from {address}); "
            "SGLang's handles are pickles, which go no further. Name it by 127.0.0.1, or use "
            "broadcast or disk"
        )

    def message(self, bucket: Packed, sink: WeightSink) -> Mapping[str, Any]:
        counts = self._counts[sink.name] = []
        return {"serialized_named_tensors": [_handles(bucket, counts) for _ in range(sink.ranks)]}

    def failed(self, sink: WeightSink) -> None:
        """A count that the server has given back itself is beyond zero then, which torch takes for
        free as well, and uses no more.
        """
        for count in self._counts.pop(sink.name, ()):
            torch.UntypedStorage._release_ipc_counter_cuda(*count)


def _unlink(name: bytes) -> None:
    _SHARED.joinpath(name.decode().strip("/")).unlink(missing_ok=True)


def _handles(bucket: Packed, counts: _Counts) -> str:
    """SGLang's "flattened_bucket": the bytes of all tensors, and where each is among them."""
    offsets = offsets_of(bucket.specs)
    metadata = [
        SimpleNamespace(
            name=spec.name,
            shape=tuple(spec.shape),
            dtype=dtype_of(spec.dtype),
            start_idx=start,
            end_idx=end,
            numel=end - start,
        )
        for spec, start, end in zip(bucket.specs, offsets, offsets[1:], strict=False)
    ]
    out = io.BytesIO()
    pickler: Any = ForkingPickler(out)
    tensor = partial(_tensor, counts=counts)
    pickler.dispatch_table |= {torch.UntypedStorage: _by_name, torch.Tensor: tensor}  # its own
    pickler.dump({"flattened_tensor": bucket.flat, "metadata": metadata})
    return base64.b64encode(out.getvalue()).decode()


def _tensor(tensor: Tensor, counts: _Counts) -> Any:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        counts.append(arguments[_CUDA_COUNT])
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_CUDA_DEVICE], uuid, *arguments[_CUDA_DEVICE + 1 :])
    return rebuild, arguments


def _by_name(storage: torch.UntypedStorage) -> Any:
    handle = storage._share_filename_cpu_()
    storage._shared_incref()  # on behalf of the one that is to rebuild it
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, *handle)
