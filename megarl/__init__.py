"""megarl: reinforcement-learning post-training of large mixture-of-experts language models.

Reading order: `megarl/train.py`, `megarl/loop.py`, then the parts it builds. Nothing is imported
here, so that `megarl --help` and the configuration tools start at once.
"""

__version__ = "0.1.0"
