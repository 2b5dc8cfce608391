"""A conversion in a process that may take so many bytes of address space more than it has::

python -m tests.checkpoint.limited import|export SOURCE OUT BYTES

``import``: a Hugging Face folder into a distributed checkpoint. ``export``: back; SOURCE has the
former's config.json beside the weights.
"""

import resource
import sys
from pathlib import Path

from megarl.checkpoint.streamed import write_weights
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.helpers.export import export


def main() -> None:
    what, source, out, allowed = sys.argv[1], *map(Path, sys.argv[2:4]), int(sys.argv[4])
    (used,) = (
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed, used + allowed))
    spec = read_spec(source)
    if what == "import":
        out.mkdir()
        write_weights(out, open_checkpoint(source), spec)
    else:
        export(source, out, spec, source)


if __name__ == "__main__":
    main()
