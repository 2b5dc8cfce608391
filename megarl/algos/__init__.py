"""Objectives: advantages, ratios, policy losses. Tensors only; knows nothing of Megatron or of
servers.
"""
