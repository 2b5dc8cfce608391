"""A checkpoint of weights alone, without what ``Import`` keeps beside, as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

from megarl.checkpoint.digests import Digests
from megarl.checkpoint.publish import publish
from megarl.checkpoint.streamed import export_weights
from megarl.checkpoint.workers import Workers
from megarl.models.fp8_export import Fp8Export
from megarl.models.hf_write import write_beside
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec


def export(
    weights: Path,
    out: Path,
    spec: ModelSpec,
    hf: Path,
    check: Callable[[Path], None] = lambda folder: None,
    fp8: Fp8Export | None = None,
) -> Digests:
    """``check``: sees the folder before it appears."""
    digests: Digests = {}
    specs, quantization = mapping_for(spec).hf_spec(), None
    if fp8 is not None:
        specs, quantization = list(fp8.specs), fp8.config()

    def write(folder: Path) -> None:
        digests.update(export_weights(weights, folder, spec, fp8=fp8))
        write_beside(hf, folder, specs, quantization)
        check(folder)

    publish(out, Workers(), 0, write)
    return digests
