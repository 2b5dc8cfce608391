"""What a run can choose that changes its memory, apart from the layout."""

from dataclasses import dataclass
from typing import Literal

from megarl.config.schema import Config


@dataclass(frozen=True)
class Rows:
    """What a rank trains on in an optimizer step: ``count`` packed rows."""

    tokens: int  # of a row
    sequence: int  # of a sequence in it, on average
    count: int


Recompute = Literal["none", "selective", "full"]


_MODULES = ("core_attn", "moe", "mlp")  # of selective recomputation where no settings say others
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Choices:
    """Bytes are of one number, on a GPU unless a field says otherwise."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = _MODULES  # with recompute=selective
    recompute_method: Literal["uniform", "block"] = "uniform"  # with recompute=full
    recompute_layers: int = 1  # with recompute=full: recompute.num_layers
    distributed_optimizer: bool = True
    offloaded: float = 0.0  # share of the optimizer's state in host memory
    fp8: bool = False  # matrix products of the layers in FP8
    fp8_stored: bool = False  # and their matrices in nothing else; else in ``dtype`` besides
    bf16_layers: tuple[int, int] = (0, 0)  # without these many first and last layers
    gradient_bytes: int = 4
    moment_bytes: tuple[int, int] = (4, 4)  # of Adam's two
    main_bytes: int = 4  # of the main parameters that bf16 ones have
    fused_norms: bool = True  # False: as on CPU

    @property
    def activation_bytes(self) -> int:
        return {"fp32": 4, "bf16": 2}[self.dtype]

    @property
    def parameter_bytes(self) -> int:
        return self.activation_bytes

    @property
    def repeats_experts(self) -> bool:
        """Whether the backward pass sends tokens to their experts again."""
        selected = self.recompute == "selective" and "moe" in self.recompute_modules
        return selected or self.recompute == "full"

    @property
    def repeats_mlp(self) -> bool:
        """Whether it computes dense MLPs again."""
        selected = self.recompute == "selective" and "mlp" in self.recompute_modules
        return selected or self.recompute == "full"

    @property
    def repeats_attention(self) -> bool:
        """Whether it computes attention's projections again."""
        return self.recompute == "full"

    @property
    def optimizer_bytes(self) -> int:
        """A parameter's main copy, which fp32 ones do not need, and both moments."""
        return (self.main_bytes if self.dtype == "bf16" else 0) + sum(self.moment_bytes)


def choices_of(config: Config) -> Choices:
    """Those that the settings make. FP8 is Transformer Engine's (``job.layout_of`` refuses another:
    what an emulation holds is nobody's plan).
    """
    optim, recompute = config.optim, config.recompute
    aware, fp8 = optim.precision_aware, config.precision.fp8
    moments = (aware.exp_avg_dtype, aware.exp_avg_sq_dtype) if aware else ("fp32", "fp32")
    return Choices(
        dtype=config.precision.dtype,
        recompute=recompute.granularity,
        recompute_modules=(recompute.modules if recompute.granularity == "selective" else _MODULES),
        recompute_method=recompute.method,
        recompute_layers=recompute.num_layers,
        distributed_optimizer=optim.distributed,
        offloaded=optim.cpu_offload.fraction if optim.cpu_offload else 0.0,
        fp8=fp8 is not None,
        fp8_stored=fp8 is not None and fp8.param_gather,
        bf16_layers=(fp8.first_layers_bf16, fp8.last_layers_bf16) if fp8 else (0, 0),
        gradient_bytes=_BYTES[config.precision.grad_reduce_dtype],
        moment_bytes=(_BYTES[moments[0]], _BYTES[moments[1]]),
        main_bytes=_BYTES[aware.main_params_dtype] if aware else 4,
    )
