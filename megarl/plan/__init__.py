"""What a model in a layout needs, by arithmetic alone: memory of every stage, bytes that move, idle
time, and layouts that fit. docs/plan.md has the formulas.

Nothing here imports Megatron or starts a process group; tests hold the numbers to what real small
models occupy.
"""
