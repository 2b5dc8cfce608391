"""The unmodified megatron-core 0.19.2 on CPU and gloo. The only place that knows what upstream
assumes of CUDA.

``install()`` comes before the first import of megatron (``actor/__init__.py`` calls it) and does
nothing where CUDA is present, so one program serves both. What it changes, and why:

1. ``torch.cuda`` calls that need a device (streams, events, current device, RNG state) become their
   meaning on CPU, where everything is synchronous and there is one RNG.
2. ``device="cuda"`` hard-coded in upstream (schedules, token dispatcher) goes to the CPU.
3. Two collectives that gloo lacks, uneven all-gather and reduce-scatter (experts with tensor
   parallelism), are built on all-to-all.
4. Two faults of the distributed optimizer with torch's AdamW, which upstream uses where neither TE
   nor apex is installed: loading a checkpoint raises KeyError 'step', and all parameters share one
   step counter.
5. Transformer Engine, where it is installed, is hidden from imports: with it upstream takes the
   router's product and the optimizer's update from kernels that exist on GPUs only. What a process
   imported before this one's first import of megarl.actor stays.

The patches are global to the process. It must not also build transformers models: their
initialisation goes through the patched factories.
"""

import functools
import importlib
import logging
import sys
import typing
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_installed = False


def install() -> bool:
    """Patch once per process. Returns whether the CPU platform is in force."""
    global _installed
    if not hasattr(typing, "override"):  # Python 3.11 lacks it, upstream imports it
        typing_extensions = importlib.import_module("typing_extensions")
        typing.override = typing_extensions.override
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    _installed = True
    _hide_transformer_engine()
    # before the patches, which would confuse its import; eager is faster here, and deterministic
    importlib.import_module("torch._dynamo").config.disable = True
    _patch_cuda_calls()
    _patch_factories()
    _patch_rng()
    _patch_token_dispatcher()
    _patch_uneven_collectives()
    _patch_distributed_optimizer()
    return True


def _hide_transformer_engine() -> None:
    """A None in place of a module makes its import an ImportError, which upstream expects."""
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


class _Stream:
    """Work on CPU is done when the call returns: a stream has nothing to order and nothing to wait
    for.
    """

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _patch_cuda_calls() -> None:
    cuda, stream = torch.cuda, _Stream()
    constants = {
        "current_device": _CPU,
        "synchronize": None,
        "set_device": None,
        "reset_peak_memory_stats": None,
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": False,
        "get_device_capability": (0, 0),
        "get_device_name": "cpu",
    }
    for (
        name,
        value,
    ) in constants.items():  # a function each: torch.compile's tables refuse one under two names
        setattr(cuda, name, _returns(value))
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _returns(None), _returns(None)
    cuda.stream = lambda s=None: s or stream
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda s, *a, **k: torch.set_rng_state(s)
    cuda.manual_seed = cuda.random.manual_seed = lambda s: torch.manual_seed(s)
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.Tensor.record_stream = _returns(None)
    torch.nn.Module.cuda = lambda self, *a, **k: self


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _patch_factories() -> None:
    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return wrapped

    for name in [
        "zeros",
        "ones",
        "empty",
        "full",
        "tensor",
        "arange",
        "rand",
        "randn",
        "randint",
        "zeros_like",
        "ones_like",
        "empty_like",
        "as_tensor",
    ]:
        setattr(torch, name, on_cpu(getattr(torch, name)))

    to, kind = torch.Tensor.to, torch.Tensor.type

    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not args and not kwargs and caller.startswith("megatron."):
            # the mixed-precision optimizer compares with 'torch.cuda.FloatTensor'
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    torch.Tensor.to, torch.Tensor.type = tensor_to, tensor_type


def _patch_rng() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # upstream queues these until CUDA is initialised, which never happens
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _patch_token_dispatcher() -> None:
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    # upstream turns only CUDA tensors into numpy; gloo's all-to-all needs host split sizes
    dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t
    )


def _patch_uneven_collectives() -> None:
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim
    all_to_all = torch.distributed.all_to_all_single

    def gather(
        x: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, output_split_sizes, use_global_buffer)
        splits, n = [int(i) for i in output_split_sizes], group.size()
        out = x.new_empty((sum(splits), *x.shape[1:]))
        all_to_all(out, torch.cat([x] * n), splits, [x.size(0)] * n, group=group)
        return out

    def scatter(
        x: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(x, group, input_split_sizes, use_global_buffer)
        splits, n = [int(i) for i in input_split_sizes], group.size()
        mine = splits[group.rank()]
        out = x.new_empty((mine * n, *x.shape[1:]))
        all_to_all(out, x.contiguous(), [mine] * n, splits, group=group)
        return out.view(n, mine, *x.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


def _patch_distributed_optimizer() -> None:
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer = module.DistributedOptimizer
    put, load = optimizer._set_main_param_and_optimizer_states, optimizer.load_state_dict

    def put_without_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():  # fp32 parameters are leaves: the copy in place must not be recorded
            put(self, param, {**tensors, "step": None})  # the step comes with the parameter groups

    def load_with_own_steps(self: Any, state: Any) -> None:
        load(self, state)
        for entry in getattr(self.optimizer, "state", {}).values():
            if torch.is_tensor(entry.get("step")):
                entry["step"] = entry["step"].clone()

    optimizer._set_main_param_and_optimizer_states = put_without_step
    optimizer.load_state_dict = load_with_own_steps
