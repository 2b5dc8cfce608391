"""When and where checkpoints are kept. What is in them is written by the parts themselves
(``actor/state.py``).
"""
