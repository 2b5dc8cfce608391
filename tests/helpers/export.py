"""A checkpoint of weights alone, without what ``Import`` keeps beside, as a Hugging Face folder."""

from pathlib import Path

from megarl.checkpoint.publish import publish
from megarl.checkpoint.streamed import export_weights
from megarl.checkpoint.workers import Workers
from megarl.models.hf_write import write_beside
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec


def export(weights: Path, out: Path, spec: ModelSpec, hf: Path, threads: int = 1) -> None:
    workers = Workers(threads=threads)

    def write(folder: Path) -> None:
        export_weights(weights, folder, spec, workers)
        write_beside(hf, folder, mapping_for(spec).hf_spec())

    publish(out, workers, 0, write)
