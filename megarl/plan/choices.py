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


@dataclass(frozen=True)
class Choices:
    """Bytes are of one number, on a GPU unless a field says otherwise."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ("core_attn", "moe", "mlp")  # with recompute=selective
    distributed_optimizer: bool = True
    offload_optimizer: bool = False
    fp8: bool = False  # matrix products of the layers in FP8; parameters stay in ``dtype``
    gradient_bytes: int = 4
    moment_bytes: int = 4  # of each of Adam's two
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
        return (self.main_bytes if self.dtype == "bf16" else 0) + 2 * self.moment_bytes


def choices_of(config: Config) -> Choices:
    """Those that the settings make."""
    return Choices(dtype=config.precision.dtype, distributed_optimizer=config.optim.distributed)
