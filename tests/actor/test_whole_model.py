"""A checkpoint's log-probs by one rank's model are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.streamed import write_weights
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.helpers.dist import WorkerPool
from tests.helpers.families import reference_logprobs, save_model
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

NAMES = ["deepseek_v3", "glm4_moe without qk norm", "gpt_oss", "qwen3 yarn tied", "llama"]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_log_probs_of_a_checkpoint_are_those_of_transformers(
    pool: WorkerPool, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Whatever dtype the weights are in, both sides compute in float32."""
    (sample,) = random_samples(1, 1, seed=5)
    models: dict[str, Any] = {}
    for i, name in enumerate(NAMES):
        hf = save_model(name, tmp_path / f"hf{i}", dtype)
        (tmp_path / f"weights{i}").mkdir()
        write_weights(tmp_path / f"weights{i}", open_checkpoint(hf), read_spec(hf))
        models[name] = (hf, tmp_path / f"weights{i}")
    work = "tests.actor.work_state:whole_logprobs"
    (found,) = pool.run(work, world=1, models=models, tokens=sample.tokens.tolist())
    for name, (hf, _) in models.items():
        (expected,) = reference_logprobs(hf, [sample])
        assert expected.std() > 0.05
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-5, msg=name)
