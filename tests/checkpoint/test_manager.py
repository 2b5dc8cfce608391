"""Checkpoints appear whole, go only when a newer one is complete, and no failure touches them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megarl.checkpoint.manager import MEGATRON, CheckpointManager, read_json
from megarl.errors import DataError, RunError
from tests.helpers.dist import WorkerPool

ROOT = Path(__file__).parent.parent.parent
GB = 10**9


@pytest.fixture
def host() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def nothing(path: Path) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Saver:
    """A run of one rank that keeps ``keep`` checkpoints."""

    def __init__(self, folder: Path, keep: int, hf: Path, host: dist.ProcessGroup) -> None:
        self.manager = CheckpointManager(folder, keep, rank=0, host=host)
        self.hf = hf

    def save(
        self, step: int, write: Callable[[Path], None] = nothing, num_bytes: int = 0, **state: Any
    ) -> Path:
        models = {"model.json": {"layers": 4}, "critic.json": {"layers": 2}}
        return self.manager.save(step, state, models, self.hf, {MEGATRON: write}, num_bytes)

    @property
    def steps(self) -> list[int]:
        return self.manager.complete_steps(self.manager.folder)


@pytest.fixture
def saver(folder: Path, hf: Path, host: dist.ProcessGroup) -> Saver:
    return Saver(folder, 2, hf, host)


# --- publishing -----------------------------------------------------------------------------------


def test_a_checkpoint_holds_what_a_later_run_needs(saver: Saver) -> None:
    path = saver.save(40, lambda to: (to / "weights").write_bytes(b"w"), cursor=[1, None])
    assert path.name == "step_40"
    files = contents(path)
    assert sorted(files) == [
        "critic.json",
        "hf/config.json",
        "hf/tokenizer.json",
        "loop.json",
        "megatron/weights",
        "model.json",
    ]
    assert files["hf/config.json"] == b'{"model_type": "qwen3_moe"}'
    assert json.loads(files["model.json"]) == {"layers": 4}
    assert json.loads(files["critic.json"]) == {"layers": 2}
    assert saver.manager.loop_state(40) == {"step": 40, "cursor": [1, None]}


def test_a_checkpoint_appears_only_when_it_is_complete(saver: Saver, folder: Path) -> None:
    seen: list[Any] = []

    def look(path: Path) -> None:
        (path / "weights").write_bytes(b"w")
        seen.append((saver.steps, sorted(p.name for p in folder.iterdir()), path.parent.name))

    saver.save(1, look)
    saver.save(2, look)
    assert seen == [
        ([], ["step_1.part"], "step_1.part"),
        ([1], ["step_1", "step_2.part"], "step_2.part"),
    ]
    assert sorted(p.name for p in folder.iterdir()) == ["step_1", "step_2"]


def test_only_folders_of_complete_checkpoints_are_counted(tmp_path: Path) -> None:
    assert CheckpointManager.complete_steps(tmp_path / "absent") == []
    for name in ("step_9", "step_10", "step_7.part", "step_x", "xstep_3", "step_-1", "step_5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loop.json").write_text("{}")
    (tmp_path / "step_5" / "loop.json").unlink()
    (tmp_path / "step_11").write_text("a file")
    assert CheckpointManager.complete_steps(tmp_path) == [9, 10]


def test_what_a_killed_run_left_of_a_checkpoint_is_replaced(saver: Saver, folder: Path) -> None:
    left = folder / "step_3.part" / "megatron"
    left.mkdir(parents=True)
    (left / "stale").write_bytes(b"old")
    (left.parent / "loop.json").write_text('{"step": 3, "old": true}')
    path = saver.save(3, lambda to: (to / "weights").write_bytes(b"new"))
    assert "megatron/stale" not in contents(path)
    assert saver.manager.loop_state(3) == {"step": 3}
    assert not left.parent.exists()


def test_a_run_killed_while_it_writes_leaves_the_last_checkpoint_as_it_was(
    folder: Path, hf: Path, host: dist.ProcessGroup
) -> None:
    """SIGKILL inside the writer, with only one checkpoint kept."""
    program = (
        "import sys; from pathlib import Path; from tests.checkpoint.work_manager import *\n"
        "killed_while_writing(*map(Path, sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, str(folder), str(hf)]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -9
    assert sorted(p.name for p in folder.iterdir()) == ["step_1", "step_2.part"]
    saver = Saver(folder, 1, hf, host)
    assert saver.steps == [1]
    assert saver.manager.loop_state(1) == {"step": 1, "cursor": 1}
    assert (folder / "step_1" / "megatron" / "weights").read_bytes() == b"one"
    saver.save(2, lambda to: (to / "other").write_bytes(b"two"))  # the next run writes it anew
    assert contents(folder / "step_2").keys() & {"megatron/weights", "megatron/other"} == {
        "megatron/other"
    }
    assert saver.steps == [2]


# --- keeping --------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_older_ones_go_only_after_a_newer_one_is_complete(
    saver: Saver,
) -> None:
    during: list[list[int]] = []
    for step in (1, 2, 9, 10, 100):  # by number, not by name
        saver.save(step, lambda _: during.append(saver.steps))
    assert during == [[], [1], [1, 2], [2, 9], [9, 10]]
    assert saver.steps == [10, 100]


def test_keeping_one_never_leaves_none(folder: Path, hf: Path, host: dist.ProcessGroup) -> None:
    saver = Saver(folder, 1, hf, host)
    during: list[list[int]] = []
    for step in (1, 2, 3):
        saver.save(step, lambda _: during.append(saver.steps))
    assert during == [[], [1], [2]]
    assert saver.steps == [3]


def test_saving_a_step_again_replaces_it(saver: Saver) -> None:
    saver.save(5, lambda to: (to / "first").write_bytes(b"1"), cursor=1)
    path = saver.save(5, lambda to: (to / "second").write_bytes(b"2"), cursor=2)
    assert "megatron/first" not in contents(path) and "megatron/second" in contents(path)
    assert saver.manager.loop_state(5)["cursor"] == 2


# --- failing --------------------------------------------------------------------------------------


def test_a_failing_writer_leaves_older_checkpoints_untouched(saver: Saver, folder: Path) -> None:
    for step in (1, 2):
        saver.save(step, lambda to: (to / "weights").write_bytes(b"w"))
    before = contents(folder)

    def fail(path: Path) -> None:
        (path / "half").write_bytes(b"h")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"step_3\.part.*No space left on device.*untouched"):
        saver.save(3, fail)
    assert saver.steps == [1, 2]
    assert {k: v for k, v in contents(folder).items() if ".part" not in k} == before
    saver.save(3)
    assert saver.steps == [2, 3]


@pytest.mark.dist
def test_writers_that_fail_on_all_ranks_raise_on_all_and_the_run_could_go_on(
    pool: WorkerPool, folder: Path, hf: Path
) -> None:
    arguments = {"folder": folder, "hf": hf, "steps": [1, 2, 3], "failing": {2: [0, 1]}}
    for outcomes in pool.run("tests.checkpoint.work_manager:save_all", world=2, **arguments):
        assert [outcomes[0], outcomes[2]] == ["step_1", "step_3"]
        kind, text = outcomes[1]
        assert kind == "RunError"
        assert "step_2.part" in text and "No space left on device" in text
    assert sorted(p.name for p in folder.iterdir()) == ["step_1", "step_2.part", "step_3"]
    for step in (1, 3):
        files = contents(folder / f"step_{step}")
        assert [json.loads(files[f"megatron/rank_{r}.json"]) for r in (0, 1)] == [step, step]


@pytest.mark.dist
def test_a_writer_that_fails_on_one_rank_ends_the_run_and_publishes_nothing(
    pool: WorkerPool, folder: Path, hf: Path
) -> None:
    """The rank that failed says why and ends; the other, which waits for it, fails as well."""
    arguments = {"folder": folder, "hf": hf, "steps": [1, 2, 3], "failing": {2: [1]}}
    zero, one = pool.run(
        "tests.checkpoint.work_manager:save_all", world=2, timeout_s=30, **arguments
    )
    assert zero[0] == one[0] == "step_1"
    assert len(zero) == len(one) == 2
    assert one[1][0] == "RunError" and "No space left on device" in one[1][1]
    assert isinstance(zero[1], tuple)
    assert CheckpointManager.complete_steps(folder) == [1]
    assert "megatron/rank_1.json" in contents(folder / "step_1")


@pytest.mark.dist
def test_a_failure_of_rank_zero_alone_is_an_error_on_all(
    pool: WorkerPool, folder: Path, hf: Path
) -> None:
    """Here state that JSON cannot hold: rank 0 must not leave the others waiting."""
    work = "tests.checkpoint.work_manager:save_what_is_no_json"
    for outcomes in pool.run(work, world=2, timeout_s=20, folder=folder, hf=hf):
        for kind, text in outcomes:
            assert kind == "RunError"
            assert "publishing a checkpoint" in text and "not JSON serializable" in text
    assert CheckpointManager.complete_steps(folder) == []


def test_a_disk_that_cannot_hold_a_checkpoint_is_refused_before_anything_is_written(
    saver: Saver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(1)
    before = contents(folder)
    free = SimpleNamespace(total=10 * GB, used=9 * GB, free=1 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(RunError) as error:
        saver.save(2, lambda _: pytest.fail("written all the same"), num_bytes=GB + 1)
    for fact in ("1.00 GB", str(folder), "checkpoint.keep", "run.dir"):
        assert fact in str(error.value)
    assert contents(folder) == before
    assert sorted(p.name for p in folder.iterdir()) == ["step_1"]
    saver.save(2, num_bytes=GB)  # exactly enough
    assert saver.steps == [1, 2]


# --- damaged --------------------------------------------------------------------------------------


def test_a_model_folder_that_is_gone_costs_no_checkpoint(saver: Saver) -> None:
    """Removed while the run goes on: its files are those of the checkpoint before, as often as
    it takes; and where there is none, weights are kept without them.
    """
    first = saver.save(1)
    (first / "files.json").write_text('{"a": "model.safetensors"}')
    expected = contents(first / "hf")
    shutil.rmtree(saver.hf)
    for step in (2, 3, 3):
        saved = saver.save(step, lambda path: (path / "w").write_bytes(b"w"))
        assert contents(saved / "hf") == expected and len(expected) == 2
        assert json.loads((saved / "files.json").read_text()) == {"a": "model.safetensors"}
    shutil.rmtree(saver.manager.folder)
    assert not (saver.save(4) / "hf").exists() and saver.steps == [4]


@pytest.mark.parametrize(
    "damage", [None, b"", b'{"step": 4', b"[1, 2]", b"\xff\xfe\x00", b"null"], ids=repr
)
def test_a_damaged_loop_file_is_refused_by_name(saver: Saver, damage: bytes | None) -> None:
    path = saver.save(4) / "loop.json"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(DataError, match=str(path)):
        saver.manager.loop_state(4)
    with pytest.raises(DataError, match=str(path)):
        read_json(path)
