"""Presets are data whose every number counts: changing any changes what is trained.

What only concerns sampling (dynamic sampling, length stages) has its tests where it acts.
"""

from pathlib import Path

import pytest

from megarl.config.algo import AlgoSection
from megarl.config.load import load_config
from tests.helpers.sensitivity import evaluate, perturbed, rich_batch, same, without_effect

ALGOS = sorted((Path(__file__).resolve().parents[2] / "configs" / "algos").glob("*.yaml"))
RUN = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1"]


def algo_of(file: Path) -> AlgoSection:
    return load_config([file], RUN).algo


@pytest.mark.parametrize("file", ALGOS, ids=lambda p: p.stem)
def test_every_number_of_a_preset_changes_the_result(file: Path) -> None:
    assert without_effect(algo_of(file)) == []


def test_no_two_presets_are_the_same_algorithm() -> None:
    """On one batch every preset gives results of its own."""
    found = {file.stem: algo_of(file) for file in ALGOS}
    names = list(found)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert found[one] != found[other], (one, other)


SHIPPED = sorted((ALGOS[0].parents[1]).glob("*/*.yaml")) + sorted(
    ALGOS[0].parents[1].glob("*.yaml")
)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_no_preset_balances_experts_or_moves_their_bias(file: Path) -> None:
    """What moves the choice of experts away from the servers' is for a run to ask for."""
    alone = file.parent.name not in ("algos", "configs")  # what needs an algorithm beside it
    moe = load_config([ALGOS[0], file] if alone else [file], RUN).moe
    found = (moe.aux_loss_coeff, moe.z_loss_coeff, moe.router_bias_update_rate)
    assert found == (0, 0, 0) and not moe.model_fields_set


def test_presets_of_the_papers_are_there() -> None:
    named = {
        *("ppo", "grpo", "grpo_process", "dapo", "dr_grpo", "skywork_or1", "gspo", "gspo_token"),
        *("sapo", "aspo", "cispo", "reinforce_pp", "rloo", "minirl", "luspo"),
    }
    assert named <= {file.stem for file in ALGOS}
    assert all(file.read_text().startswith("# ") for file in ALGOS)


def test_the_walk_sees_what_a_preset_sets() -> None:
    """Guards the test above: the clip bounds of a preset are among what is changed."""
    algo = algo_of(ALGOS[0].with_name("gspo.yaml"))
    changed = dict(perturbed(algo))
    assert {"policy.eps_low", "policy.eps_high", "advantage.eps"} <= set(changed)
    batch = rich_batch(algo)
    assert not same(evaluate(changed["policy.eps_high"], batch), evaluate(algo, batch))
