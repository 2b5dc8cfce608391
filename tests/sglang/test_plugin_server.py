"""A real SGLang server proves its weights: what it received, by any way, is what it serves."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import ServerError
from megarl.rollout.control import ServerControl
from megarl.rollout.features import PLUGIN_VERSION
from megarl.rollout.probe import Probe
from tests.helpers.tools import tool
from tests.sglang.conftest import Models
from tests.sglang.protocol import digests, joined_group, ok, prompt_logprobs, send
from tests.sglang.server import SGLangServer, require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.timeout(1500)]

Tensors = dict[str, torch.Tensor]
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def control(sglang_server: SGLangServer) -> Iterator[ServerControl]:
    identity = Probe(sglang_server.url, sglang_server.key).identity()
    control = ServerControl(sglang_server.url, sglang_server.key, version=identity.version)
    yield control
    sglang_server.post("/end_weight_update")  # refused where none is open
    sglang_server.post("/continue_generation")


def weights_of(model: Path) -> Tensors:
    return load_file(model / "model.safetensors")


def proven(
    server: SGLangServer,
    control: ServerControl,
    first: Tensors,
    second: Tensors,
    *,
    num_server_ranks: int = 1,
) -> None:
    """A push as the transport makes one to a process that has to prove itself."""
    assert control.proves
    wrong: list[ServerError] = []
    with (
        ThreadPoolExecutor(2) as background,
        joined_group(server, background, num_server_ranks=num_server_ranks) as group,
    ):
        try:
            control.control("begin", {}, 60)
            send(server, group, background, first)
            assert control.control("digest", {}, 60)["digests"] == digests(first)
            control.control("snapshot", {}, 60)
            send(server, group, background, second)
            assert control.control("digest", {}, 60)["digests"] == digests(second)
            control.control("compare", {}, 60)
            control.control("commit", {"version": 9}, 60)
        except ServerError as error:  # the group is left first
            wrong.append(error)
    if wrong:
        raise wrong[0]


def test_the_server_says_which_plugin_it_has(sglang_server: SGLangServer) -> None:
    assert Probe(sglang_server.url, sglang_server.key).identity().plugin == PLUGIN_VERSION


def test_the_same_push_again_proves_that_it_writes_everything(
    sglang_server: SGLangServer, control: ServerControl, tiny_models: Models
) -> None:
    """Between the two the server's weights are garbage; then they are what they were, and what they
    are from files.
    """
    ok(sglang_server, "/update_weights_from_disk", model_path=str(tiny_models.b))
    expected = prompt_logprobs(sglang_server)
    weights = weights_of(tiny_models.b)
    proven(sglang_server, control, weights, weights)
    assert prompt_logprobs(sglang_server) == expected


def test_who_would_serve_garbage_says_so_and_is_not_let_go_on(
    sglang_server: SGLangServer, control: ServerControl, tiny_models: Models
) -> None:
    """As a trainer leaves it that is killed in the middle of a push, or of a proof."""
    probe = Probe(sglang_server.url, sglang_server.key)
    load = {"model_path": str(tiny_models.a), "flush_cache": False}
    assert not probe.identity().waits
    control.control("begin", {}, 60)
    assert probe.identity().waits
    assert probe.check(2.0).waits  # no error, after which somebody would let it go on
    control.control("begin", {"session": False}, 60)  # the next trainer
    control.control("load_path", load, 60)
    assert not probe.identity().waits
    control.control("snapshot", {}, 60)
    assert probe.identity().waits  # its weights are spoiled
    control.control("load_path", load, 60)
    assert probe.identity().waits  # until it is proven
    control.control("compare", {}, 60)
    control.control("commit", {"version": 5, "session": False}, 60)
    assert not probe.check(10.0).waits


def test_a_second_push_that_leaves_something_out_proves_nothing(
    sglang_server: SGLangServer, control: ServerControl, tiny_models: Models
) -> None:
    weights = weights_of(tiny_models.b)
    short = {name: tensor for name, tensor in weights.items() if name != K_PROJ}
    with pytest.raises(ServerError, match=r"rank 0: .*1 of \d+ parameters .*0\.self_attn\.qkv"):
        proven(sglang_server, control, weights, short)
    del short["model.norm.weight"], short["model.layers.0.self_attn.q_norm.weight"]
    with pytest.raises(ServerError, match=r"nothing to 2 parameters .*q_norm.*model\.norm"):
        proven(sglang_server, control, short, weights)


def test_a_name_that_the_model_does_not_know_is_an_error(
    sglang_server: SGLangServer, control: ServerControl, tiny_models: Models
) -> None:
    junk = {"model.layers.1.mlp.junk.weight": torch.ones(3)}
    with pytest.raises(ServerError, match=r"no place for 1 of \d+ .*layers\.1\.mlp\.junk"):
        proven(sglang_server, control, {**weights_of(tiny_models.b), **junk}, {})


@pytest.mark.parametrize("in_session", [False, True])
def test_weights_from_files_are_recorded(
    sglang_server: SGLangServer, control: ServerControl, tiny_models: Models, in_session: bool
) -> None:
    for model in tiny_models:
        control.control("begin", {"session": in_session}, 60)
        load = {"model_path": str(model), "flush_cache": False}
        control.control("load_path", load, 60)
        told = control.control("digest", {}, 60)
        assert told["digests"] == digests(weights_of(model)) and 0 < told["digest_seconds"] < 30
        control.control("commit", {"version": 3, "session": in_session}, 60)


def test_what_is_not_known_of_weights_is_not_told(
    sglang_server: SGLangServer, control: ServerControl, tiny_models: Models, tmp_path: Path
) -> None:
    """A folder without weights. (One whose files end in the middle ends SGLang itself: it goes back
    to the files that it had before, and takes these for them.)
    """
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((tiny_models.a / "config.json").read_bytes())
    load = {"model_path": str(broken), "flush_cache": False}
    with pytest.raises(ServerError):
        control.control("load_path", load, 60)
    with pytest.raises(ServerError, match=r"rank 0: digest: .*the last one failed"):
        control.control("digest", {}, 60)
    assert Probe(sglang_server.url, sglang_server.key).identity().waits
    sglang_server.post("/weights_checker", {"action": "digest_compare"})  # a failed proof's, if any
    with pytest.raises(ServerError, match="there is no digest_snapshot"):
        control.control("compare", {}, 60)
    ok(sglang_server, "/update_weights_from_disk", model_path=str(tiny_models.a))
    assert control.control("digest", {}, 60)["digests"] == digests(weights_of(tiny_models.a))


# --- other servers --------------------------------------------------------------------------------


@pytest.mark.slow
def test_experts_of_another_rank_are_no_error_and_every_rank_proves(
    tiny_models: Models, tmp_path: Path
) -> None:
    require_sglang()
    server = SGLangServer(
        tiny_models.a,
        log_path=tmp_path / "server.log",
        extra_args=("--tp-size", "2", "--ep-size", "2"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"},
    )
    weights = weights_of(tiny_models.b)
    with server:
        identity = Probe(server.url, server.key).identity()
        control = ServerControl(server.url, server.key, version=identity.version)
        proven(server, control, weights, weights, num_server_ranks=2)
        reply = ok(server, "/weights_checker", action="digest", selector="target")
        lost = [set(json.loads(r["checksums"]["megarl:dropped"])) for r in reply["ranks"]]
        experts = {name for name in weights if ".experts." in name}
        low = {name for name in experts if int(name.split(".experts.")[1].split(".")[0]) < 4}
        vocabulary = {"model.embed_tokens.weight", "lm_head.weight"}  # padding on the second rank
        assert lost == [experts - low, low | vocabulary]
        short = {n: t for n, t in weights.items() if n != max(experts)}
        with pytest.raises(ServerError, match=r"rank 1: .*\.experts\.w"):
            proven(server, control, weights, short, num_server_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_codes_and_scales_of_fp8_are_proven(scales: str, ranks: int, tmp_path: Path) -> None:
    from tests.conftest import make_tiny_model

    require_sglang()
    sizes = ("--hidden", "256", "--heads", "8", "--head-dim", "64", "--kv-heads", "4")
    source = make_tiny_model(tmp_path / "source", *sizes, "--moe-ffn", "256", "--seed", "1")
    tool("quantize_hf_fp8").quantize(source, tmp_path / "fp8", scales, [])
    more = ("--tp-size", "2") if ranks == 2 else ()
    server = SGLangServer(
        tmp_path / "fp8",
        log_path=tmp_path / "server.log",
        extra_args=more,
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"} if more else None,
    )
    weights = weights_of(tmp_path / "fp8")
    with server:
        expected = prompt_logprobs(server)
        identity = Probe(server.url, server.key).identity()
        control = ServerControl(server.url, server.key, version=identity.version)
        proven(server, control, weights, weights, num_server_ranks=ranks)
        assert prompt_logprobs(server) == expected
