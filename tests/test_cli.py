"""The megarl command, as a user types it: what it prints and how it exits."""

import ast
import inspect
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import cli, cli_servers
from megarl.errors import (
    ConfigError,
    DataError,
    InstallError,
    Problem,
    RunError,
    ServerError,
    UnfitServerError,
)
from megarl.monitor.samples import SampleText, write_samples
from megarl.rundir import RunDir, write_json
from tests.conftest import Megarl

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 24,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("x")
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    path = tmp_path / "config.yaml"
    settings = {
        "run": {"dir": f"{tmp_path}/my run", "steps": 10},
        "model": {"hf": str(model)},
        "parallel": {"tp": 2, "dp": 2, "ep": 2},
        "data": {"prompts": f"{tmp_path}/prompts.jsonl", "prompts_per_step": 8},
        "algo": {"policy": {"name": "gspo"}, "minibatches": 2},
        "optim": {"lr": 1e-4},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_help_is_instant_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; sys.argv = ['megarl', '--help']\n"
        "from megarl.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pydantic', 'omegaconf', 'transformers', 'matplotlib', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("config", "serve", "samples", "report", "first-error", "doctor"):
        assert command in done.stdout


def test_settings_are_read_without_torch(config_file: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from megarl.config.load import load_config\n"
        "import megarl.config.validate, megarl.config.docs, megarl.monitor.report\n"
        f"load_config([Path({str(config_file)!r})], [])\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# --- config ---------------------------------------------------------------------------------------


def test_show_prints_every_setting_as_yaml_that_loads(megarl: Megarl, config_file: Path) -> None:
    code, out, _ = megarl("config", "show", config_file, "optim.lr=3e-4")
    shown = yaml.safe_load(out)
    assert code == 0 and shown["optim"]["lr"] == 3e-4 and shown["sync"]["backend"] == "auto"
    code, out, _ = megarl("config", "show", "--given", config_file)
    assert code == 0 and set(yaml.safe_load(out)) == set(yaml.safe_load(config_file.read_text()))


def test_check_sums_up_a_consistent_configuration(megarl: Megarl, config_file: Path) -> None:
    code, out, err = megarl("config", "check", config_file)
    assert (code, err) == (0, "")
    assert "world size 4 = tp 2 x pp 1 x cp 1 x dp 2, ep 2 x etp 2 for experts" in out
    assert "10 steps, 20 optimizer steps; 8 prompts x 8 samples a step" in out


def test_check_for_a_shell_prints_assignments_only(
    megarl: Megarl, config_file: Path, tmp_path: Path
) -> None:
    code, out, _ = megarl("config", "check", "--shell", config_file)
    assert code == 0
    script = f'{out}\nprintf \'%s|%s\' "$NPROC" "$RUN_DIR"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"4|{tmp_path}/my run"
    assert [word.split("=")[0] for word in shlex.split(out)] == [
        *("NPROC", "RUN_DIR", "RESTARTS", "SERVERS")
    ]


def test_check_prints_every_problem_without_a_traceback(megarl: Megarl, config_file: Path) -> None:
    code, out, err = megarl("config", "check", config_file, "optim.lrr=1", "run.steps=x", "oops=")
    assert (code, out) == (2, "") and "Traceback" not in err
    for words in ("3 problems", "did you mean optim.lr?", "run.steps", "override 'oops='"):
        assert words in err
    code, _, err = megarl("config", "check", config_file, "parallel.pp=3", "data.prompts=/no")
    assert code == 2
    for words in ("2 problems", "a divisor of num_hidden_layers = 2 (1, 2)", "/no, which does not"):
        assert words in err
    code, _, err = megarl("config", "check", config_file, "train.frozen=[model.embed_token.*]")
    assert code == 2 and "train.frozen[0]" in err and "model.embed_tokens.weight" in err
    assert megarl("config", "check", config_file, "train.frozen=[model.embed_tokens.*]")[0] == 0
    code, _, err = megarl("config", "check", "--no-paths", config_file, "data.prompts=/no")
    assert code == 0


def test_check_says_in_what_the_servers_model_is_another_one(
    megarl: Megarl, config_file: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "model.safetensors").write_text("x")
    check = ("config", "check", config_file, f"rollout.model={served}")
    (served / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": "bfloat16"}))
    assert megarl(*check)[0] == 0
    other = {**MODEL, "rope_theta": 5e5, "num_experts_per_tok": 4}
    (served / "config.json").write_text(json.dumps(other))
    code, _, err = megarl(*check)
    assert code == 2 and "2 problems" in err
    for words in ("rollout.model: rope_theta: found 500000.0", "rollout.model: topk: found 4"):
        assert words in err
    (served / "config.json").write_text(json.dumps({**MODEL, "norm_topk_prob": "maybe"}))
    code, _, err = megarl(*check)
    assert code == 2 and "megarl: rollout.model: " in err and "norm_topk_prob" in err
    gone = f"rollout.model={tmp_path}/gone"
    assert megarl("config", "check", "--no-paths", config_file, gone)[0] == 0


def test_check_compares_with_the_ranks_there_will_be(megarl: Megarl, config_file: Path) -> None:
    assert megarl("config", "check", "--world-size", 4, config_file)[0] == 0
    code, _, err = megarl("config", "check", "--world-size", 8, config_file)
    assert code == 2 and "= 4; accepted: a product equal to the number of ranks, 8" in err
    code, _, err = megarl("config", "check", config_file, "sync.backend=nccl", "--num-gpus", 2)
    assert code == 2 and "nccl with 2 devices" in err


def test_check_refuses_a_model_that_is_not_supported(
    megarl: Megarl, config_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**MODEL, "model_type": "gemma2"}))
    code, _, err = megarl("config", "check", config_file)
    assert code == 2 and "model_type is gemma2" in err and "qwen3_moe" in err
    path.write_text(json.dumps({**MODEL, "hidden_act": "gelu"}))
    code, _, err = megarl("config", "check", config_file)
    assert code == 2 and "hidden_act" in err and "gelu" in err


def test_docs_prints_the_page(megarl: Megarl) -> None:
    code, out, _ = megarl("config", "docs")
    page = Path(cli.__file__).resolve().parents[1] / "docs" / "configuration.md"
    assert code == 0 and out == page.read_text("utf-8")


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for step in (1, 2):
        write_samples(
            run.samples,
            step,
            [
                SampleText(
                    step, f"{step} + {i} =", f"a{step}{i}\x1b[2J", "9", i, i > 0, False, step
                )
                for i in (0, 1)
            ],
        )
    return run


@pytest.mark.parametrize(
    "options, shown",
    [
        ([], ["a20", "a21"]),
        (["--step", 1], ["a10", "a11"]),
        (["--last", 3], ["a11", "a20", "a21"]),
        (["--prompt", "+ 1"], ["a11", "a21"]),
        (["--prompt", "+ 1", "--last", 1], ["a21"]),
        (["--prompt", "none"], []),
    ],
)
def test_samples_are_chosen_and_shown_readably(
    megarl: Megarl, run: RunDir, options: list[object], shown: list[str]
) -> None:
    code, out, err = megarl("samples", run.root, *options)
    assert code == 0 and "\x1b" not in out
    assert [r for r in ("a10", "a11", "a20", "a21") if r in out] == shown
    for words in ("prompt", "expected  9", "weights", "reward"):
        assert (words in out) == bool(shown)
    assert ("no kept sample has 'none'" in err) == (not shown)


@pytest.mark.parametrize(
    "options, words", [(["--step", 7], "no step 7; there are 1 to 2"), ([], "holds no samples")]
)
def test_samples_that_are_not_there_say_so(
    megarl: Megarl, run: RunDir, options: list[object], words: str
) -> None:
    root = run.root if options else run.root.parent
    code, out, err = megarl("samples", root, *options)
    assert (code, out) == (1, "") and words in err and "Traceback" not in err


def test_report_is_rebuilt_and_its_path_printed(megarl: Megarl, run: RunDir) -> None:
    code, out, _ = megarl("report", run.root)
    assert code == 0 and out.strip() == str(run.report) and run.report.exists()
    code, _, err = megarl("report", run.root / "nowhere")
    assert code == 1 and "no run directory" in err


def test_first_error_prints_the_cause_and_fails_like_the_run(megarl: Megarl, run: RunDir) -> None:
    assert megarl("first-error", run.root) == (0, "", "")
    for rank, kind, when in ((0, "BrokenPipeError", 10.0), (1, "ValueError", 11.0)):
        value = {"time": when, "rank": rank, "host": "n1", "where": "train", "error": kind}
        launch = RunDir(run.root, "monday")
        write_json(launch.errors / f"rank_{rank}.json", {**value, "message": "m", "traceback": ""})
    for options in ([], ["--launch", "monday"]):
        code, out, _ = megarl("first-error", run.root, *options)
        assert code == 1 and out.startswith("rank 1 on n1 failed first in train:\nValueError: m\n")
    assert megarl("first-error", run.root, "--launch", "tuesday") == (0, "", "")  # no error of it


# --- machine and server ---------------------------------------------------------------------------


def test_doctor_fits_a_screen(megarl: Megarl) -> None:
    _, out, _ = megarl("doctor")
    assert "torch" in out and "megatron-core" in out and len(out.splitlines()) <= 24


def test_serve_has_the_options_and_defaults_of_the_server_itself() -> None:
    # Read, not imported: the server brings torch and transformers, seconds of them.
    tree = ast.parse((Path(cli.__file__).parent / "serve.py").read_text())
    (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    values = [inspect.Parameter.empty, *(ast.literal_eval(d) for d in main.args.defaults)]
    theirs = dict(zip([a.arg for a in main.args.args], values, strict=True))
    ours = {n: p.default for n, p in inspect.signature(cli_servers.serve).parameters.items()}
    assert ours == theirs
    assert ours["host"] == "127.0.0.1"  # not every interface


def test_a_launcher_is_told_what_to_start_again(
    megarl: Megarl, config_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*overrides: str) -> tuple[str, str]:
        code, out, _ = megarl("config", "check", "--shell", config_file, *overrides)
        assert code == 0
        values = dict(line.split("=", 1) for line in out.splitlines())
        return values["RESTARTS"], values["SERVERS"]

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert told() == ("0", "0")
    assert told("on_failure.trainer=restart") == ("8", "0")
    both = "on_failure={trainer: restart, servers: restart, max_restarts: 3}"
    assert told(both) == ("3", "1")
    assert told(both, "rollout.discover=true") == ("3", "0")  # somebody else sees to them
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert told() == ("8", "1")
    assert told("on_failure.trainer=stop") == ("0", "0")
    assert told("on_failure.servers=stop") == ("8", "0")


def test_a_failed_run_goes_on_from_its_checkpoint_or_anew(megarl: Megarl, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert megarl("go-on", str(run.root))[:2] == (0, "")
    run.logs.mkdir(parents=True)
    for path in (run.config, run.metrics, run.key, run.server("a-0")):
        path.write_text("{}")
    (run.checkpoints / "step_3.part").mkdir(parents=True)  # was being written
    code, out, err = megarl("go-on", str(run.root))
    assert (code, out) == (0, "") and str(run.root / "attempts" / "1") in err
    assert not run.holds_a_run()
    assert {p.name for p in run.root.iterdir()} == {
        *("attempts", "logs", "run.lock", "server.key", "server_a-0.json")
    }
    assert {p.name for p in (run.root / "attempts" / "1").iterdir()} == {
        *("config.yaml", "metrics.jsonl", "checkpoints")
    }
    run.metrics.write_text("")
    assert megarl("go-on", str(run.root))[0] == 0 and (run.root / "attempts" / "2").is_dir()
    (run.checkpoints / "step_3").mkdir(parents=True)
    (run.checkpoints / "step_3" / "loop.json").write_text("{}")
    assert megarl("go-on", str(run.root))[:2] == (0, "run.resume=true\n")


@pytest.mark.parametrize(
    "error, mended",
    [
        (ConfigError([Problem("a", "b", "c")]), False),
        (DataError("step_3 is damaged"), False),
        (InstallError("two packages of one name"), False),
        (UnfitServerError("the server is sglang 0.1"), False),
        (ServerError("server 0 died: signal SIGKILL"), True),
        (RunError("the collector process ended"), True),
        (MemoryError(), True),
        (OSError(28, "No space left on device"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_goes_on_only_after_what_a_restart_mends(
    megarl: Megarl, tmp_path: Path, error: Exception, mended: bool
) -> None:
    run = RunDir(tmp_path / "run", "monday-r1")
    run.record_error(0, "step 3", RunError("reading failed on rank 1: x"))  # an echo
    run.record_error(1, "step 3", error)
    run.metrics.write_text("")
    assert megarl("go-on", str(run.root), "--launch", "monday")[0] == 0  # another start's
    run.metrics.write_text("")
    code, out, err = megarl("go-on", str(run.root), "--launch", "monday-r1")
    assert (code, out) == (0 if mended else 1, "") and type(error).__name__ in err
    assert run.metrics.exists() is not mended  # set aside


def test_a_run_that_lives_is_not_set_aside(megarl: Megarl, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run.lock():
        run.metrics.write_text("")
        code, out, err = megarl("go-on", str(run.root))
    assert (code, out) == (1, "") and "is in use by" in err and run.metrics.exists()
