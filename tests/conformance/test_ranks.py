"""The processes that evaluate rows cut over context-parallel ranks."""

import pytest

from megarl.conformance.ranks import Ranks, RanksError


@pytest.mark.dist
def test_ranks_that_fail_die_or_are_silent_end_the_wait() -> None:
    with Ranks("tests.conformance.work_ranks:work", deadline_s=20) as ranks:
        assert ranks.run(2, {"do": "sum"}) == [3.0, 3.0]
        with pytest.raises(RanksError, match="rank 1: on purpose"):
            ranks.run(2, {"do": "raise"})
        assert ranks.run(2, {"do": "sum"}) == [3.0, 3.0]  # with new processes
        with pytest.raises(RanksError, match="rank 1: died"):
            ranks.run(2, {"do": "die"})
    with Ranks("tests.conformance.work_ranks:work", deadline_s=0.5) as ranks:
        with pytest.raises(RanksError, match=r"did not answer within 0\.5 s"):
            ranks.run(1, {"do": "sum"})
        assert ranks.processes == []
