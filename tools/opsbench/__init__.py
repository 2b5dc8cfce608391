"""What ``tools/bench_ops.py`` measures: one file an op, each with a ``rows(options)`` function."""
