"""Runs that docs/gpu-verification.md asks for contradict no rule: who has the GPUs gets as far as
what is to be verified.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.load import load_config, split_arguments
from megarl.config.validate import validate
from megarl.installed import Gpu, Installed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu-verification.md"
# One that writes down its arguments, a line each, and a blank line
LAUNCHER = '#!/bin/bash\nprintf "%s\\n" "$@" "" >>"$ARGUMENTS"\n'
EVERYTHING = Installed((2, 20), True, True, True, True, True, gpu=Gpu((9, 0), (13, 0)))
HF = {  # of the demo's model (tools/make_tiny_model.py)
    **{"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8},
    **{"intermediate_size": 128, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
}


def commands() -> Iterator[str]:
    """Code on the page that launches runs."""
    for row in PAGE.read_text("utf-8").splitlines():
        yield from (code for code in re.findall(r"`([^`]+)`", row) if "launch/local.sh " in code)


@pytest.mark.parametrize("command", commands())
def test_a_command_is_one_that_a_run_takes(command: str, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    launcher = tmp_path / "launch" / "local.sh"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    written = tmp_path / "arguments"
    env = {**os.environ, "ARGUMENTS": str(written)}
    # other programs are not there, and what they would do does not matter
    given = command.replace("HOST:PORT", "host:1")
    subprocess.run(["bash", "-c", given], cwd=tmp_path, env=env, capture_output=True, timeout=30)
    runs = [run.splitlines() for run in written.read_text("utf-8").split("\n\n") if run]
    assert runs
    for arguments in runs:
        files, overrides = split_arguments(arguments)
        config = load_config([ROOT / file for file in files], overrides)
        critic = HF if config.critic.hf else None
        validate(
            config,
            **{"world_size": None, "num_gpus": 8, "hf_config": HF, "critic_hf_config": critic},
            **{"check_paths": False, "packages": EVERYTHING},
        )


def test_there_are_such_commands() -> None:
    assert len(list(commands())) > 15
