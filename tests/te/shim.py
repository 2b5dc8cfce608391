"""Lets the real Transformer Engine construct its modules on a machine without a GPU.

Nothing of it can run there: its matrix products, norms and optimizer steps are CUDA kernels. What
its constructors decide (names, shapes, layouts of state, what is quantised and how) needs none.
Import this before megarl.actor: Transformer Engine then stays visible (``megarl/actor/cpu.py``),
and two facts are different for it, and for nobody else:

1. A CUDA device is available, while the constructor of its modules' base class runs, which refuses
   to go on without one.
2. The device is of compute capability 9.0, as H100 and H200 are, wherever it asks: recipes and
   attention are then chosen as on such a GPU.

Everything else that a constructor wants of CUDA (the current device, tensors made on it) is what
``megarl/actor/cpu.py`` makes of it.
"""

from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch  # noqa: F401  visible from now on
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

import megarl.actor  # noqa: F401  its patches

CAPABILITY = (9, 0)


def _install() -> None:
    assert not torch.cuda.is_available(), "with a GPU nothing is to be pretended"
    construct = TransformerEngineBaseModule.__init__

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):  # fact 1
            construct(self, *args, **kwargs)

    TransformerEngineBaseModule.__init__ = constructed
    utils._get_device_compute_capability = lambda device: CAPABILITY  # fact 2


_install()
