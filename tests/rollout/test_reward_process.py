"""Rewards that never end, or end their process, cost their own group."""

import time
from pathlib import Path

from megarl.rollout.collector import Collector
from megarl.rollout.process import lives
from tests.rollout.collecting import REWARDS, request, settings_in, taken, write_folder
from tests.rollout.offspring import children_of, ends_with, started_by_reward
from tests.rollout.scripted import EOS, VOCAB, Server, in_thread

TIMEOUT_S = 1.0


def test_a_reward_that_never_returns_costs_its_group_and_its_deadline(tmp_path: Path) -> None:
    """Also one that lets no other thread run, and one that ends its process. What they have started
    ends, too, where it is orphaned and where it leads a session. Groups between them are scored.
    """
    folder = write_folder(tmp_path, VOCAB, EOS)
    deeds = ["sleep", "exit", "loop", "sys.exit", "children", "abort"]
    slow = {"sleep", "loop", "children"}
    bad = {2 * i + 1: deed for i, deed in enumerate(deeds)}
    requests = [
        ends_with(request(n, answer=n % 2, **({"deed": bad[n]} if n in bad else {})))
        for n in range(2 * len(deeds) + 1)
    ]
    made = Collector(
        settings_in(folder, reward=f"{REWARDS}deadly", reward_timeout_s=TIMEOUT_S, max_attempts=1)
    )
    log = made.settings.log_file
    server = Server()
    with in_thread(server):
        made.serve_from([server.member])
        made.issue(requests[:1])
        assert taken(made, 1)[0].samples
        keeper = children_of(made.pid)
        start = time.monotonic()
        made.issue(requests[1:])
        found = taken(made, len(requests) - 1)
        assert len(slow) * TIMEOUT_S < time.monotonic() - start < 20
        ended = started_by_reward(log, 2)
        assert not [pid for family in ended for pid in family if lives(pid)]
        for n, outcome in found.items():
            if n not in bad:
                (sample,) = outcome.samples
                right = (len(sample.tokens) - 3 - 1) % 2 == n % 2
                assert (sample.reward, outcome.failed, outcome.unscored) == (right, "", False)
                continue
            how = "ended its process"
            if bad[n] in slow:
                how = f"took longer than {TIMEOUT_S:g} s (data.reward_timeout_s)"
            words = f"data.reward={REWARDS}deadly {how} on sample p{n}/0"
            assert outcome.unscored and outcome.samples == () and outcome.failed == words
        made.issue([ends_with(request(50, answer=0, deed="children"))])
        family = started_by_reward(log, 3)[-1]
        assert children_of(made.pid) == keeper and all(map(lives, family))
        made.close()
    assert not any(map(lives, [made.pid, *keeper, *family]))
