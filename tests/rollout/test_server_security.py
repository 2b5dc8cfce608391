"""Nothing that is sent to the embedded server is run: pickles in every form, at every endpoint."""

import base64
import io
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megarl.rollout.server import build_app
from tests.helpers import pickled
from tests.rollout.conftest import Server

ROUTES = sorted(
    {
        (route.method, route.resource.canonical)
        for route in build_app(cast(Any, None), "key").router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
)


def attacks(marker: Path) -> dict[str, bytes]:
    """Bytes that make ``marker`` where somebody unpickles them."""
    saved = io.BytesIO()
    torch.save({"weight": pickled.calls(marker)["posix.system"]}, saved)
    return {
        "a call": pickled.dumped(pickled.calls(marker)["posix.system"]),
        "by attributes alone": pickled.dumped(pickled.by_attributes(marker)),
        "an old protocol": pickled.dumped(pickled.calls(marker)["builtins.eval"], 0),
        "a torch file": saved.getvalue(),
        "with a good JSON object behind": pickled.dumped(pickled.calls(marker)["io.open"]) + b"{}",
    }


def test_the_attacks_work_where_they_are_trusted(tmp_path: Path) -> None:
    for name, data in attacks(tmp_path / "marker").items():
        load = pickled.trusted_object if name == "a torch file" else pickled.trusted
        load(data)
        assert (tmp_path / "marker").exists(), name
        (tmp_path / "marker").unlink()


@pytest.mark.parametrize("name", attacks(Path("marker")))
def test_a_pickle_as_a_body_is_refused_everywhere(
    server: Server, tmp_path: Path, name: str
) -> None:
    data = attacks(tmp_path / "marker")[name]
    assert ("POST", "/generate") in ROUTES and len(ROUTES) > 15
    for method, path in ROUTES:
        status, _ = server.call(method, path, data)
        reads_no_body = method == "GET" or path == "/flush_cache"
        assert status in (range(200, 500) if reads_no_body else range(400, 500)), (path, status)
    assert not (tmp_path / "marker").exists()
    assert len(server.generate([3], new=1)["output_ids"]) == 1  # it goes on


def test_a_pickle_in_a_field_is_refused_everywhere(server: Server, tmp_path: Path) -> None:
    """As SGLang takes tensors, LoRA and multimodal data: in base64 inside JSON."""
    for name, data in attacks(tmp_path / "marker").items():
        text = base64.b64encode(data).decode()
        for field in ("serialized_named_tensors", "serialized_tensors", "names", "group_name"):
            for path in (
                *("/update_weights_from_tensor", "/load_lora_adapter_from_tensors"),
                *("/update_weights_from_distributed", "/init_weights_update_group"),
            ):
                status, _ = server.call("POST", path, {field: [text], "load_format": None})
                assert 400 <= status < 500, (name, path, field, status)
        for field in ("input_ids", "image_data", "custom_logit_processor", "rid"):
            body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}, field: text}
            status, _ = server.call("POST", "/generate", body)
            assert (status == 200) == (field == "rid"), (name, field, status)
    assert not (tmp_path / "marker").exists()


def test_a_pickle_for_a_path_is_refused(server: Server, tmp_path: Path) -> None:
    """A folder of weights with pickles in it, in the place of safetensors."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_bytes((server.model / "config.json").read_bytes())
    data = attacks(tmp_path / "marker")["a torch file"]
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors"):
        (folder / name).write_bytes(data)
        body = {"model_path": str(folder), "weight_version": "9"}
        status, _ = server.call("POST", "/update_weights_from_disk", body)
        assert status >= 400, name
        (folder / name).unlink()
    assert not (tmp_path / "marker").exists()
