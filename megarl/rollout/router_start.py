"""Starts an sglang-router that learns its key from a file, so that it is in no argument list:
`python router_start.py KEY_FILE -m MODULE ARGUMENTS...`

Runs under the router's own Python, which knows nothing of this package. The key is that of every
request (`--api-key`) and of whoever adds and removes workers (`--control-plane-api-keys`).
"""

import runpy
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    key_file, flag, module, *rest = arguments
    assert flag == "-m", arguments
    key = Path(key_file).read_text().strip()
    keys = ["--api-key", key, "--control-plane-api-keys", f"run:run:admin:{key}"]
    del sys.path[0]  # this folder, whose modules would hide others of the same names
    sys.argv = [module, *rest, *keys]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
