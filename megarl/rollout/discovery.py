"""Servers that other processes have started for this run, on whatever machine.

`megarl servers` tells of each in the run directory, `server_LABEL.json`:

    {"url", "pid", "host", "boot", "ranks", "version"}

written when it answers, removed when it ends, with another `boot` when it was started again. What
is told here is not believed: who does not answer is no member.
"""

import json
import logging
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from megarl.rollout.keeper import Care, NamedKeeper
from megarl.rollout.mailbox import ask_for_another, told_to_hold
from megarl.rundir import RunDir

log = logging.getLogger(__name__)

_EVERY_S = 1.0


class Discovery:
    """A keeper for every server that is told of."""

    def __init__(self, run_dir: RunDir, care: Care) -> None:
        self._run_dir, self._care = run_dir, care
        self._keepers: dict[str, NamedKeeper] = {}  # in the order in which they were first seen
        self._complained: set[Path] = set()
        self._closed = threading.Event()
        self._look()
        threading.Thread(target=self._run, name="discovery", daemon=True).start()

    def keepers(self) -> list[NamedKeeper]:
        return list(self._keepers.values())

    def hold(self) -> AbstractContextManager[None]:
        return told_to_hold(self._run_dir)

    def close(self) -> None:
        self._closed.set()
        for keeper in self.keepers():
            keeper.close()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            try:
                self._look()
            except OSError as error:  # a shared file system may stumble; the next look is soon
                log.warning("looking for servers in %s: %s", self._run_dir.root, error)

    def _look(self) -> None:
        told: dict[str, dict[str, object]] = {}
        for file in sorted(self._run_dir.root.glob("server_*.json")):
            if (entry := self._read(file)) is not None:
                told[file.stem.removeprefix("server_")] = entry
        for label, keeper in list(self._keepers.items()):
            entry = told.get(label, {})
            if keeper.moved(entry.get("boot"), entry.get("url"), entry.get("ranks")):
                keeper.close()
                del self._keepers[label]
                if label not in told:
                    log.info("%s is not told of any more", keeper.name)
        for label in told.keys() - self._keepers.keys():
            entry = told[label]
            keeper = NamedKeeper(
                f"server {label}",
                str(entry["url"]),
                self._care,
                boot=str(entry["boot"]),
                ranks=int(str(entry["ranks"])),
                disown=partial(ask_for_another, self._run_dir, label),
            )
            self._keepers[label] = keeper
            keeper.start()

    def _read(self, file: Path) -> dict[str, object] | None:
        """None, with one warning, for what is no such file."""
        try:
            entry = json.loads(file.read_text())
            wanted = {"url": str, "boot": str, "ranks": int}
            good = all(type(entry[name]) is kind for name, kind in wanted.items())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            good = False
        if good:
            return dict(entry)
        if file not in self._complained:
            self._complained.add(file)
            log.warning("%s does not tell of a server: url, boot and ranks are wanted", file)
        return None
