"""Training on unpatched megatron-core; the only package that imports it."""

from megarl.actor import cpu

cpu.install()
