"""An engine whose receiver is still writing what it has received."""

from pathlib import Path

import pytest

from megarl.errors import ServerError
from megarl.rollout.embedded import Engine
from tests.rollout.test_engine import NoWeights, slot_model


class Late(NoWeights):
    """One that still writes what it has received; it turns out that it cannot."""

    writing = True

    def begin(self) -> None:
        self.writing = False

    def digests(self) -> dict[str, str]:
        raise ServerError("a bucket could not be written")


def test_weights_that_could_not_be_written_make_the_server_unusable(model_a: Path) -> None:
    engine = Engine(slot_model(model_a), Late())
    engine.start()
    engine.begin_update().result()
    assert engine.state()["unusable"] is None
    with pytest.raises(ServerError, match="could not be written"):
        engine.digests().result()
    assert "a bucket could not be written" in engine.state()["unusable"]
    engine.stop()


def test_nothing_is_being_written_any_more_when_a_folder_is_read(
    model_a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Late()
    engine = Engine(slot_model(model_a), receiver)
    writing: list[bool] = []
    load = engine.model.load_folder
    monkeypatch.setattr(
        engine.model, "load_folder", lambda source: (writing.append(receiver.writing), load(source))
    )
    engine.start()
    engine.load_folder(model_a, "1", abort=False).result()
    assert writing == [False] and engine.state()["weight_version"] == "1"
    engine.stop()
