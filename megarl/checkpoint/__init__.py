"""Checkpoints: when and where a run keeps them (``manager.py``; what is in them is written by the
parts themselves, ``actor/state.py``), and conversion without a model.

``streamed.py`` says what a conversion does, ``workers.py`` who does it, ``publish.py`` when its
output appears, ``verify.py`` whether it is right. ``torch_dist.py`` writes files in Megatron's
format, ``stored.py`` and ``chunk.py`` read anyone's, ``inspect.py`` looks at them.
"""
