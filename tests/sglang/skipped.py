"""Run by SGLang's interpreter: which modules its FP8 configuration leaves plain. Reads and writes
JSON::

    [[quantization_config, {fused module: [parts]}, [module, ...]], ...]
    [[bool, ...], ...]      True: not in FP8
"""

import json
import sys

from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped


def main() -> None:
    found = []
    for config, fused, modules in json.load(sys.stdin):
        ignored = Fp8Config.from_config(config).ignored_layers
        found.append([is_layer_skipped(m, ignored, fused_mapping=fused) for m in modules])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
