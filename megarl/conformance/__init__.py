"""Test vectors of RL objectives in, results out, computed by the code that training runs.

``python -m megarl.conformance CASES.json --out RESULTS.json``; docs/conformance.md has the format,
which is meant for other implementations as well.
"""
