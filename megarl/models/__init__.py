"""Model families: what config.json says, how parameters are named on both sides, files on disk.

Tensors and host data only. ``spec.py`` reads, ``mapping.py`` converts, ``hf_io.py`` and
``hf_write.py`` do the files; a family is one file (a reader and a table of rules) and one line in
``spec.FAMILIES``.
"""
