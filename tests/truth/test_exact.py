"""No token that was not sampled is trained: a collector, and the embedded server."""

from pathlib import Path

import pytest

from tests.helpers.dist import WorkerPool
from tests.helpers.families import COMMON
from tests.rollout.spelling import write_tokenizer
from tests.truth import exact
from tests.truth.models import save
from tests.truth.proxy import Proxy
from tests.truth.served import Question, embedded
from tests.truth.tolerances import check, differences


@pytest.mark.dist
def test_samples_are_what_the_server_said_also_when_interrupted(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folder = save("routed", "fp32", tmp_path / "model")
    tokenizer = write_tokenizer(tmp_path / "tokenizer", COMMON["vocab_size"], exact.EOS)
    with (
        embedded(folder) as server,
        Proxy(server.url).running() as proxy,
        exact.collecting(proxy, server.key, folder, tokenizer, tmp_path) as collector,
    ):
        counts, said = exact.run(collector, proxy, server, limit=40)
    assert min(counts["stop"], counts["length"], counts["continued"]) > 0, counts
    # with the experts it said, over continuations too: those of another token would show
    (found,) = differences(pool, [Question(folder, said, "fp32", 1.0, True)], 1)
    check(found, "fp32")
