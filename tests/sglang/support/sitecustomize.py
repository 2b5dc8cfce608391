"""Python imports this file at start-up in every process whose PYTHONPATH holds this folder.

Why: torchvision's wheel is linked against CUDA. Beside a CPU build of torch its native library does
not load, its operators are not registered, and `import torchvision`, which SGLang does at start,
dies when it registers shape functions for them. Declaring the two operators first is enough:
nothing here ever calls them.
"""

import importlib.abc
import sys


class _DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    library = None  # torch forgets the declarations when their Library object dies

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.version.cuda:
                _DeclareTorchvisionOps.library = torch.library.Library("torchvision", "DEF")
                signature = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
                for op in ("nms", "qnms"):
                    self.library.define(op + signature)
        return None  # the ordinary import goes on


sys.meta_path.insert(0, _DeclareTorchvisionOps())
