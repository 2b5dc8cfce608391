"""Which layers lie where: written down by hand, and as upstream's models count them
(tests/actor/test_layouts.py)."""

import pytest

from megarl.mesh import Mesh


@pytest.mark.parametrize(
    ("mesh", "layers", "expected"),
    [
        (Mesh(), 5, [[[0, 1, 2, 3, 4]]]),
        (Mesh(pp=2), 4, [[[0, 1]], [[2, 3]]]),
        (Mesh(pp=2, vpp=2), 4, [[[0], [2]], [[1], [3]]]),
        (Mesh(pp=2, first_layers=1), 4, [[[0]], [[1, 2, 3]]]),
        (Mesh(pp=2, first_layers=3, last_layers=1), 4, [[[0, 1, 2]], [[3]]]),
        (Mesh(pp=3, last_layers=1), 7, [[[0, 1, 2]], [[3, 4, 5]], [[6]]]),
        (Mesh(pp=4, first_layers=1, last_layers=2), 7, [[[0]], [[1, 2]], [[3, 4]], [[5, 6]]]),
        (
            Mesh(pp=2, vpp=2, first_layers=2),
            6,
            [[[0], [3]], [[1, 2], [4, 5]]],
        ),
        (
            Mesh(pp=3, vpp=2, first_layers=2, last_layers=2),
            8,
            [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]],
        ),
    ],
    ids=str,
)
def test_the_layers_of_every_chunk(
    mesh: Mesh, layers: int, expected: list[list[list[int]]]
) -> None:
    found = [
        [list(mesh.layers_of(layers, stage, k)) for k in range(mesh.vpp)]
        for stage in range(mesh.pp)
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("mesh", "senders", "turn", "expected"),
    [
        (Mesh(dp=4, ep=4), [0], 3, [0, 0, 0, 0]),
        (Mesh(dp=4, ep=4), [2, 0], 0, [0, 0, 2, 2]),
        (Mesh(dp=4, ep=4), [0, 1, 2, 3], 1, [0, 1, 2, 3]),
        (Mesh(dp=4, ep=4), [1], 0, [1, 1, 1, 1]),  # those before the first are the first's, too
        (Mesh(dp=4, ep=4), [1, 3], 0, [1, 1, 1, 3]),
        (Mesh(tp=2, dp=2, ep=2, etp=2), [0, 2], 5, [0, 0, 2, 2]),
        (Mesh(tp=2, dp=2, ep=2, etp=2), [0, 1, 2], 0, [0, 0, 2, 2]),
        (Mesh(tp=2, dp=2, ep=2, etp=2), [0, 1, 2], 1, [1, 1, 2, 2]),
        (Mesh(tp=2, dp=2, ep=2, etp=2), [0, 1, 2], -1, [1, 1, 2, 2]),
    ],
    ids=str,
)
def test_who_sends_the_experts_of_every_rank_of_an_expert_group(
    mesh: Mesh, senders: list[int], turn: int, expected: list[int]
) -> None:
    assert mesh.expert_senders(senders, turn) == expected


@pytest.mark.parametrize(
    ("mesh", "layers", "message"),
    [
        (Mesh(pp=2), 5, "5 layers are left for 2 equal stages"),
        (Mesh(pp=4, first_layers=2), 7, "5 layers are left for 3 equal stages"),
        (Mesh(pp=3, first_layers=3, last_layers=3), 6, "0 layers are left for 1 equal stages"),
        (Mesh(pp=2, first_layers=3, last_layers=3), 5, "-1 layers are left for 0 equal stages"),
        (Mesh(pp=2, vpp=2), 6, r"stages of \[3, 3\] layers cannot be cut into vpp 2 chunks"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(mesh: Mesh, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh.stage_layers(layers)
