"""Who serves, as all ranks know it: weights come before traffic, and nobody waits for ever."""

from pathlib import Path
from typing import Any

import pytest

from megarl.types import Max, Member
from tests.helpers.dist import WorkerPool
from tests.sync.servers import digests_of, several

pytestmark = pytest.mark.dist

WORLD = 3
COLLECTING = (0, 2)


def member(name: str) -> Member:
    return Member(name[0], f"http://{name[0]}:1", name[1:])


def members(*names: str) -> list[Member]:
    return [member(name) for name in names]


def played(pool: WorkerPool, *acts: tuple[Any, ...], routed: bool = False) -> list[list[Any]]:
    """What every rank has to tell of the acts that are calls."""
    return pool.run("tests.work_servers:acts", world=WORLD, acts=acts, routed=routed)


def told(rank: list[Any], act: int) -> list[Any]:
    """What a collector was told during one act: servers, and their version at least."""
    return [tuple(rest) for what, *rest in rank[act][1] if what == "serve from"]


def test_a_server_that_comes_back_gets_the_weights_before_collectors_hear_of_it(
    pool: WorkerPool,
) -> None:
    ranks = played(
        pool,
        ("members", "a1", "b1"),
        ("push", 5),
        ("refresh",),
        ("members", "b1"),  # a dies
        ("refresh",),
        ("members", "a2", "b1"),  # and is restarted
        ("refresh",),
        ("push", 6),
    )
    for rank, events in enumerate(ranks):
        collects = rank in COLLECTING
        pushes = [[e[1:] for e in happened if e[0] == "push"] for _, happened in events]
        assert pushes == [[(5, ["a", "b"])], [], [], [(5, ["a"])], [(6, ["a", "b"])]]
        changed = [returned for returned, _ in events[1:4]]
        assert changed == [False, True, True]
        steps = [told(events, act) for act in range(5)]
        now = [
            [(members("a1", "b1"), 5)],
            [],
            [(members("b1"), 5)],
            [(members("a2", "b1"), 5)],
            [(members("a2", "b1"), 6)],  # the same ones, with newer weights
        ]
        assert steps == (now if collects else [[]] * 5)
        for _, happened in events:  # first the weights
            order = [what for what, *_ in happened if what in ("push", "serve from")]
            assert order == sorted(order)
    assert ranks[0][4][0] == [
        ("servers/serving", Max(2)),
        ("servers/lost", Max(0)),
        ("sync/version", Max(6)),
        ("sync/seconds", Max(0.5)),
        ("sync/stall_seconds", Max(0.25)),
        ("sync/verify_seconds", Max(0.125)),
        ("sync/calls", Max(2)),
        ("sync/bytes", Max(12)),
        ("sync/tensors", Max(3)),
    ]
    assert [rank[4][0] for rank in ranks[1:]] == [[], []]


def test_who_comes_after_the_weights_have_moved_waits_for_the_next_push(pool: WorkerPool) -> None:
    """The trainer has weights 6 by then: sent as those of 5 they would be taken for these."""
    moved = "refresh, trained"
    acts = [("members", "a1", "b1"), ("push", 5), ("members", "a2", "b1"), (moved,), (moved,)]
    ranks = played(pool, *acts, ("members", "a2"), (moved,), ("push", 6))
    for rank, events in enumerate(ranks):
        pushes = [e[1:] for _, happened in events for e in happened if e[0] == "push"]
        assert pushes == [(5, ["a", "b"]), (6, ["a"])]
        if rank in COLLECTING:
            heard = [said for act in range(len(events)) for said in told(events, act)]
            both, one = members("a1", "b1"), members("b1")
            assert heard == [(both, 5), (one, 5), ([], 5), (members("a2"), 6)]


def test_who_comes_after_the_weights_have_moved_gets_those_that_are_stored(
    pool: WorkerPool,
) -> None:
    moved = "refresh, trained"
    acts = [("keeping",), ("members", "a1"), ("push", 5), ("members", "a1", "b1"), (moved,)]
    ranks = played(pool, *acts, ("push", 6))
    for rank, events in enumerate(ranks):
        pushes = [e[1:] for _, happened in events for e in happened if e[0] == "push"]
        assert pushes == [(5, ["a"]), (5, ["b"]), (6, ["a", "b"])]
        if rank in COLLECTING:
            heard = [said for act in range(len(events)) for said in told(events, act)]
            both = members("a1", "b1")
            assert heard == [(members("a1"), 5), (both, 5), (both, 6)]


def test_a_server_lost_to_a_push_is_given_up_and_withdrawn_until_it_has_been_restarted(
    pool: WorkerPool,
) -> None:
    ranks = played(
        pool,
        ("members", "a1", "b1"),
        ("push", 1),
        ("losing", {"a": "it hung"}),
        ("push", 2),
        ("refresh",),  # the fleet has not noticed yet
        ("push", 3),
        ("members", "a2", "b1"),
        ("refresh",),  # lost again, as a newcomer
        ("losing", {}),
        ("members", "a3", "b1"),
        ("refresh",),
        ("losing", {"a": "x", "b": "y"}),
        ("push", 4),
    )
    for rank, events in enumerate(ranks):
        pushes = [e[1:] for _, happened in events for e in happened if e[0] == "push"]
        assert pushes == [
            (1, ["a", "b"]),
            (2, ["a", "b"]),
            (3, ["b"]),
            (3, ["a"]),
            (3, ["a"]),
            (4, ["a", "b"]),
        ]
        gone = [e[1:] for _, happened in events for e in happened if e[0] == "give up"]
        lost = [(member("a1"), "it hung"), (member("a2"), "it hung")]
        lost += [(member("a3"), "x"), (member("b1"), "y")]
        assert gone == (lost if rank == 0 else [])
        held = [e[1:] for _, happened in events for e in happened if e[0] == "pushed"]
        whole = [("a1", "b1"), ("b1",), ("b1",), (), ("a3",), ()]
        named = [(members(*names), v) for names, v in zip(whole, [1, 2, 3, 3, 3, 4], strict=True)]
        assert held == (named if rank == 0 else [])
        if rank in COLLECTING:
            heard = [said for act in range(len(events)) for said in told(events, act)]
            one, both = members("b1"), members("a3", "b1")
            assert heard == [(members("a1", "b1"), 1), (one, 2), (one, 3), (both, 3), ([], 4)]
    assert ranks[0][6][0] == [("servers/serving", Max(0)), ("servers/lost", Max(2))]


def test_what_collectors_suspect_reaches_the_fleet(pool: WorkerPool) -> None:
    a, b = members("a1", "b1")
    suspects = {0: {a: "slow"}, 2: {a: "refused", b: "broken"}}
    ranks = played(pool, ("members", "a1", "b1"), ("push", 1), ("refresh", suspects))
    assert [rank[1][0] for rank in ranks] == [False] * 3
    assert ranks[0][1][1] == [("suspect", a, "slow"), ("suspect", b, "broken")]
    assert [rank[1][1] for rank in ranks[1:]] == [[], []]


@pytest.mark.parametrize(
    ("comes", "trouble", "patience_s", "broken", "expected", "least", "most"),
    [
        (0.5, None, 30.0, False, "['a']", 0.4, 5.0),
        (None, "server 0 died 9 times: exit code 3", 30.0, False, "exit code 3", 0.0, 2.0),
        (None, None, 0.7, False, "start_timeout_s", 0.6, 5.0),
        (None, None, 30.0, True, "memory is gone", 0.0, 2.0),
    ],
    ids=["one comes", "none will come", "none came in time", "the fleet fails"],
)
def test_a_run_without_servers_waits_in_bounded_time_on_every_rank(
    pool: WorkerPool,
    comes: float | None,
    trouble: str | None,
    patience_s: float,
    broken: bool,
    expected: str,
    least: float,
    most: float,
) -> None:
    arguments = {"comes_after_s": comes, "trouble": trouble, "patience_s": patience_s}
    ranks = pool.run("tests.work_servers:waiting", world=WORLD, broken=broken, **arguments)
    for result, seconds in ranks:
        assert expected in str(result)
        assert comes is not None or result[0] in ("ServerError", "RunError", "SyncError")
        assert least <= seconds < most


def test_a_stop_ends_the_wait_for_servers(pool: WorkerPool) -> None:
    arguments = {"comes_after_s": None, "trouble": None, "patience_s": 30.0, "broken": False}
    work = "tests.work_servers:waiting"
    for serving, seconds in pool.run(work, world=WORLD, stops_after_s=0.5, **arguments):
        assert serving == [] and 0.4 <= seconds < 5.0


def test_a_real_server_is_told_of_with_the_trainers_version_only(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    """Version 41: as after a resume. What collectors are told of is asked for its version there and
    then.
    """
    file = tiny_model / "model.safetensors"
    with several(tiny_model, tmp_path / "run", 3) as servers:
        described = [server.described for server in servers]
        described[2]["name"] = described[1]["name"]
        work = "tests.work_servers:restarts"
        ranks = pool.run(work, world=2, file=file, servers=described, version=41)
        heard, values = ranks[0]
        first, second, again = (str(server.pid) for server in servers)
        assert heard == [
            {first: "41", second: "41"},
            {first: "41"},
            {first: "41", again: "41"},
            {first: "42", again: "42"},
        ]
        assert (values["sync/version"], values["servers/serving"], values["servers/lost"]) == (
            42,
            2,
            0,
        )
        assert servers[2].version() == "42"
        assert servers[2].digests() == digests_of(tiny_model)


def test_a_router_hears_of_servers_first_and_collectors_of_the_router_alone(
    pool: WorkerPool,
) -> None:
    acts = [("members", "a1", "b1"), ("push", 5), ("members", "b1"), ("refresh",)]
    ranks = played(pool, *acts, ("members",), ("refresh",), ("refresh",), routed=True)
    router = Member("router", "http://r:1", "router")
    for rank, events in enumerate(ranks):
        said = [
            [(what, rest[0]) for what, *rest in happened if what in ("router serves", "serve from")]
            for _, happened in events
        ]
        heard = [[("router serves", names)] * (rank == 0) for names in (["a", "b"], ["b"], [])]
        tells = [[("serve from", [router])], [], [("serve from", [])]]  # the same one: not again
        asked = [tell * (rank in COLLECTING) for tell in tells]
        assert said == [*(h + a for h, a in zip(heard, asked, strict=True)), []]
