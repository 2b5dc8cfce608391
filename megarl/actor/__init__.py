"""Training on unpatched megatron-core; the only package that imports it."""

import importlib
import logging
import warnings

from megarl.actor import cpu
from megarl.installed import explain, require_sound

# Upstream tells on every start which of its optional parts are absent and which of its classes will
# change: not about this run, and nothing a user of ours can act on.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.(checkpoint|c10d_logger)")
for _name in ("models.gpt.gpt_model", "distributed", "dist_checkpointing", "optimizer", "utils"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

require_sound()
try:
    cpu.install()
    importlib.import_module("megatron.core")
except Exception as e:
    if (reason := explain(e)) is None:
        raise
    raise reason from e
