"""Contradictions: the valid base has none, and each mistake alone gives exactly its problem."""

from pathlib import Path

import pytest

from megarl.config.files import read_hf_config
from megarl.config.load import load_config
from megarl.config.training import optimizer_steps
from megarl.config.validate import validate
from tests.config.cases import Case, assert_exactly, base, found_problems

URLS = ["rollout.urls=[http://a:1]", "rollout.key_file=HERE/key"]
STAGES = "rollout.length_stages="
VALID = [
    Case([], {}),
    Case([], {}, "sft"),
    Case([], {}, "train_only"),
    Case([], {}, "sft", hf={"quantization_config": {"quant_method": "fp8"}}),  # read as its values
    Case([], {}, "train_only", hf={"quantization_config": {"quant_method": "fp8"}}),
    Case([], {}, world_size=None),
    Case(["rollout.temperature=0.7"], {}, "train_only"),
    Case(["parallel={tp: 2, pp: 2, dp: 2, ep: 1}"], {}, dense=True),
    Case(["parallel.etp=1", "parallel.ep=4"], {}),
    Case(["parallel.etp=1", "parallel.ep=4"], {}, hf={"model_type": "gpt_oss"}),
    Case(["parallel={cp: 2, dp: 1}"], {}),
    Case(["parallel.vpp=2"], {}),
    Case(["parallel={tp: 2, pp: 2, dp: 2}", "sync.senders=4"], {}),
    Case(["parallel={first_layers: 3, last_layers: 1}"], {}),
    Case(["parallel={pp: 4, dp: 1, ep: 1, first_layers: 1}"], {}, hf={"num_hidden_layers": 7}),
    Case(["parallel={vpp: 2, last_layers: 4}"], {}, hf={"num_hidden_layers": 10}),
    Case(["train.row_buckets=4", "parallel={tp: 2, pp: 1, dp: 4}"], {}),
    Case(["train.row_buckets=3", "parallel.vpp=2"], {}),
    Case([*URLS, "rollout.urls=[http://a:30000,https://b.c:1]", "rollout.start_timeout_s=5"], {}),
    Case([*URLS, "rollout.context_length=100"], {}),
    Case(
        ["rollout.engine=sglang", "rollout.server_command=[sh]", "rollout.context_length=100"], {}
    ),
    Case(["eval.every=2", "data.heldout=HERE/heldout.jsonl", "eval.max_new_tokens=30"], {}),
    Case([], {}, num_gpus=8),
    Case(["sync.backend=nccl", *URLS], {}, num_gpus=8),
    Case(["optim.warmup_steps=5", "optim.decay_fraction=0.5", "optim.min_lr_ratio=0.1"], {}),
    Case(["optim.warmup_steps=15", "algo.minibatches=2"], {}),
    Case(
        [
            f"{STAGES}[{{max_new_tokens: 8, until_step: 4}},{{max_new_tokens: 16, until_converged: "
            "{window: 2}},{max_new_tokens: 32, until_step: 9},{max_new_tokens: 63}]"
        ],
        {},
    ),
    Case([f"{STAGES}[{{max_new_tokens: 8}}]"], {}),
    Case(["algo.overlong={l_max: 19, l_cache: 4}", "algo.dynamic_sampling={}"], {}),
    Case(["algo.overlong={l_max: 999, l_cache: 999}"], {}, "train_only"),
    Case(["algo.dynamic_sampling={}"], {}, "train_only"),
    Case(["data.samples_per_prompt=1", "algo.advantage.name=reinforce_pp"], {}),
    Case(["data.samples_per_prompt=1", "algo.advantage={name: grpo, singleton: raw}"], {}),
    # Saying that something is off is true, not without effect.
    Case(
        ["eval.every=0", "model.load=null", "rollout.urls=[]", "monitor.record_rollouts=false"], {}
    ),
    Case(
        ["eval.every=0", "rollout.port=0", "data.prompts=null", "optim.min_lr_ratio=0"], {}, "sft"
    ),
    # The first layers dense, experts in the others: both sizes count. MLA has no key/value heads.
    Case([], {}, hf={"first_k_dense_replace": 1, "kv_lora_rank": 16, "num_key_value_heads": 3}),
    Case([], {}, hf={"intermediate_size": 97}),  # of dense layers, which this model does not have
]

SGLANG = ["rollout.engine=sglang", "rollout.server_command=[python]"]
FIRST, LAST = "parallel.first_layers=", "parallel.last_layers="
LAYOUT = [
    Case([], {"parallel": ["tp 2 * pp 2 * cp 1 * dp 2 = 8", "ranks, 16"]}, world_size=16),
    Case([], {"parallel.tp": ["2", "num_attention_heads = 7 (1, 7)"]},
         hf={"num_attention_heads": 7}),
    Case([], {"parallel.tp": ["2", "num_key_value_heads = 1"]}, hf={"num_key_value_heads": 1}),
    Case(["parallel.ep=1"], {"parallel.tp": ["2", "intermediate_size = 97"]}, dense=True,
         hf={"intermediate_size": 97}),
    Case([], {"parallel.tp": ["intermediate_size = 97"]},
         hf={"intermediate_size": 97, "first_k_dense_replace": 1}),
    Case([], {"parallel.tp": ["the shared experts' intermediate size = 51"]},
         hf={"shared_expert_intermediate_size": 51}),
    Case([], {"parallel.tp": ["moe_intermediate_size = 49 (1, 7, 49)"]},
         hf={"moe_intermediate_size": 49}),
    Case(["parallel.etp=2"], {"parallel.etp": ["2", "moe_intermediate_size = 49"]},
         hf={"moe_intermediate_size": 49}),
    Case([], {"parallel.pp": ["2", "num_hidden_layers = 5 (1, 5)"]}, hf={"num_hidden_layers": 5}),
    *(
        Case(SGLANG, {"model.hf with rollout.engine=sglang": [f"{key} is {value}", "embedded"]},
             hf={"model_type": "qwen3_moe", key: value})
        for key, value in (
            ("mlp_only_layers", [0]), ("mlp_only_layers", [1, 2]), ("decoder_sparse_step", 2),
            ("tie_word_embeddings", True),
        )
    ),
    Case(SGLANG, {}, hf={"model_type": "qwen3_moe", "mlp_only_layers": [],
                         "decoder_sparse_step": 1, "tie_word_embeddings": False}),
    Case(SGLANG, {}, hf={"model_type": "qwen3", "tie_word_embeddings": True}),
    Case([], {}, hf={"model_type": "qwen3_moe", "tie_word_embeddings": True}),
    Case(["parallel.vpp=2"], {"parallel.pp": ["num_hidden_layers = 5"]},
         hf={"num_hidden_layers": 5}),
    Case([FIRST + "3"], {"parallel.first_layers": ["3 of num_hidden_layers = 2", "found -1 left"]},
         hf={"num_hidden_layers": 2}),
    Case([FIRST + "2", LAST + "2"],
         {"parallel.first_layers and parallel.last_layers": ["2 of", "all of them"]},
         hf={"num_hidden_layers": 5}),
    Case(["parallel={pp: 4, dp: 1, ep: 1, first_layers: 2}"],
         {"parallel.first_layers": ["a multiple of 3 layers left", "pp 4 - 1 = 3", "found 5 left"]},
         hf={"num_hidden_layers": 7}),
    Case(["parallel={pp: 4, dp: 1, ep: 1, last_layers: 4}"],
         {"parallel.last_layers": ["a multiple of 3 layers left", "found 0 left"]}),
    Case([FIRST + "2", "parallel.vpp=2"], {"parallel.vpp": ["num_hidden_layers / pp 2 = 3 (1, 3)"]},
         hf={"num_hidden_layers": 5}),
    Case([FIRST + "3", "parallel.vpp=2"], {"parallel.vpp": ["parallel.first_layers = 3 (1, 3)"]},
         hf={"num_hidden_layers": 7}),
    Case(["parallel={pp: 1, dp: 4, first_layers: 2, last_layers: 1}"],
         {"parallel.first_layers": ["2", "null, or parallel.pp > 1"],
          "parallel.last_layers": ["1", "null, or parallel.pp > 1"]}),
    Case(["parallel={pp: 4, dp: 1, ep: 1}", "sync.senders=3"],
         {"sync.senders": ["3", "1 to 2: the ranks of a pipeline stage"]}),
    Case(["parallel.vpp=3"], {"parallel.vpp": ["3", "num_hidden_layers / pp 2 = 2 (1, 2)"]}),
    Case(["parallel={pp: 1, dp: 4, vpp: 3}"], {"parallel.vpp": ["3", "1, or parallel.pp > 1"]}),
    Case([], {"parallel.ep": ["2", "the number of experts = 9 (1, 3, 9)"]}, hf={"num_experts": 9}),
    Case(["parallel.ep=4"], {"parallel.ep": ["ep 4 * etp 2 = 8 (etp is tp by default)",
                                             "divides tp 2 * cp 1 * dp 2 = 4"]}),
    Case([], {"parallel.ep": ["2", "1: the model has no experts"]}, dense=True),
    Case(["parallel={tp: 2, cp: 2, dp: 1}", "train.row_tokens=4100"],
         {"train.row_tokens": ["4100", "a multiple of 8 (2 * cp 2 * tp 2)"]}),
    Case(["train.row_tokens=4097"], {"train.row_tokens": ["a multiple of 2 (tp 2)"]}),
    Case([], {"model.hf": ["llama", "of type gpt_oss, qwen3, qwen3_moe"]},
         hf={"model_type": "llama"}),
    Case([], {"model.hf": ["is qwen3_next", "qwen3_moe (qwen3_next: its layers do not run)"]},
         hf={"model_type": "qwen3_next"}),
    Case([], {"parallel.etp": ["2, which is tp by default", "1: ", "biases"]},
         hf={"model_type": "gpt_oss"}),
    Case(["parallel.etp=2"], {"parallel.etp": ["2", "1: "]}, hf={"model_type": "gpt_oss"}),
    Case([], {"model.hf": ["without num_hidden_layers, vocab_size"]},
         hf={"num_hidden_layers": None, "vocab_size": None}),
]  # fmt: skip

SETTINGS = [
    # batches
    Case(["algo.minibatches=3"], {"data.prompts_per_step": ["32", "algo.minibatches = 3"]}),
    Case(["algo.minibatches=3"], {"data.prompts_per_step": ["multiple"]}, "sft"),
    Case(["data.prompts_per_step=1", "parallel={pp: 1, dp: 16}"], world_size=32,
         expected={"data.prompts_per_step": ["1 (times 8 samples", "dp 16 ranks in each of 1"]}),
    Case(["data.prompts_per_step=2", "algo.minibatches=2"],
         {"data.prompts_per_step": ["dp 2 ranks in each of 2"]}, "sft"),
    Case(["data.samples_per_prompt=1"],
         {"data.samples_per_prompt": ["1", "at least 2: algo.advantage.name=grpo"]}),
    Case(["data.samples_per_prompt=1", "algo.dynamic_sampling={}",
          "algo.advantage.name=reinforce_pp"],
         {"data.samples_per_prompt": ["1", "at least 2: algo.dynamic_sampling"]}),
    # schedule
    Case(["optim.betas=[0.9,1]"], {"optim.betas[1]": ["1.0", ">= 0 and < 1"]}),
    Case(["optim.betas=[-0.1,0.9]"], {"optim.betas[0]": ["-0.1"]}),
    Case(["optim.warmup_steps=10"], {"optim.warmup_steps": ["10", "less than the run's 10"]}),
    Case(["optim.warmup_steps=6", "optim.decay_fraction=0.5"],
         {"optim.warmup_steps": ["6", "the last 5 of which fall"]}),
    # mode
    Case(["data.prompts=null"], {"data.prompts": ["nothing", "run.mode=rl reads it"]}),
    Case(["data.demonstrations=null"], {"data.demonstrations": ["run.mode=sft"]}, "sft"),
    Case(["data.recorded=null"], {"data.recorded": ["run.mode=train_only"]}, "train_only"),
    Case(["algo.policy.name=sft"], {"algo.policy.name": ["sft", "gspo, gspo_token", "=rl"]}),
    Case(["algo.policy.name=sapo"], {"algo.policy.name": ["sapo | sft, as run.mode=sft"]}, "sft"),
    Case(["eval.every=2"], {"data.heldout": ["nothing", "eval.every=2 reads it"]}),
    Case(["eval.every=2", "data.heldout=HERE/model/../prompts.jsonl"],
         {"data.heldout": ["the file of data.prompts"]}),
    # lengths
    Case(["rollout.max_new_tokens=64"], {"rollout.max_new_tokens": ["64", "context_length = 64"]}),
    Case(["eval={every: 1, max_new_tokens: 99}", "data.heldout=HERE/heldout.jsonl"],
         {"eval.max_new_tokens": ["99", "context_length = 64"]}),
    Case(["train.row_tokens=62"], {"train.row_tokens": ["62", "context_length = 64"]}),
    Case(["train.row_tokens=16", *URLS], {"train.row_tokens": ["16", "context_length = 64"]}),
    Case(["rollout.context_length=129"],
         {"rollout.context_length": ["129", "max_position_embeddings = 128"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8}},{{max_new_tokens: 16}}]"],
         {"rollout.length_stages[0]": ["no end | one of until_step and until_converged"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8, until_step: 2, until_converged: {{}}}},"
          "{max_new_tokens: 16}]"],
         {"rollout.length_stages[0]": ["until_step and until_converged | one of"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8, until_step: 2}}]"],
         {"rollout.length_stages[0].until_step": ["2", "nothing: the last stage lasts"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8, until_converged: {{window: 3}}}}]"],
         {"rollout.length_stages[0].until_converged": ["window=3", "nothing: the last stage"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8, until_step: 2}},{{max_new_tokens: 8}}]"],
         {"rollout.length_stages[1].max_new_tokens": ["8 | more than the 8 of the stage before"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8, until_step: 10}},{{max_new_tokens: 16}}]"],
         {"rollout.length_stages[0].until_step": ["10 | less than run.steps = 10"]}),
    Case([f"{STAGES}[{{max_new_tokens: 4, until_step: 5}},{{max_new_tokens: 8, until_converged: "
          "{}},{max_new_tokens: 9, until_step: 5},{max_new_tokens: 16}]"],
         {"rollout.length_stages[2].until_step": ["5 | more than the 5 of an earlier stage, and"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8, until_step: 3}},{{max_new_tokens: 64}}]"],
         {"rollout.length_stages[1].max_new_tokens": ["64", "context_length = 64"]}),
    Case([f"{STAGES}[{{max_new_tokens: 8}}]", "rollout.max_new_tokens=8"],
         {"rollout.max_new_tokens": ["8, which has no effect", "leave out one of the two"]}),
    Case(["algo.overlong={l_max: 8, l_cache: 9}"],
         {"algo.overlong.l_cache": ["9 | at most algo.overlong.l_max = 8"]}),
    Case(["algo.overlong={l_max: 8, l_cache: 9}"],
         {"algo.overlong.l_cache": ["9 | at most algo.overlong.l_max = 8"]}, "train_only"),
    Case(["algo.overlong={l_max: 20, l_cache: 4}"],
         {"algo.overlong": ["l_max - l_cache = 16, which has no effect",
                            "rollout.max_new_tokens = 16"]}),
    Case(["algo.overlong={l_max: 20, l_cache: 4}",
          f"{STAGES}[{{max_new_tokens: 8, until_step: 3}},{{max_new_tokens: 12}}]"],
         {"algo.overlong": ["= 16", "rollout.length_stages[1].max_new_tokens = 12"]}),
    # servers and devices
    Case(["rollout.engine=sglang"], {"rollout.server_command": ["nothing", "starts SGLang"]}),
    Case(["precision.fp8={backend: emulated}", "rollout.fp8=power_of_two"],
         {"rollout.fp8": ["power_of_two", "f32, as precision.fp8.scales"]}),
    Case(["precision={dtype: fp32, fp8: {backend: emulated}}"],
         {"precision.dtype": ["fp32 | bf16, or precision.fp8: null"]}),
    Case(["rollout.port=70000"], {"rollout.port": ["70000", "65535"]}),
    Case([*URLS, "rollout.urls=[http://a:1,http://a:1/]"], {"rollout.urls[1]": ["a:1/ again"]}),
    Case(["rollout.urls=[http://a:1]"], {"rollout.key_file": ["nothing", "key of the servers"]}),
    *(
        Case([f"rollout={{engine: sglang, server_command: [sh], server_args: [--seed, '2', {a}]}}"],
             {"rollout.server_args[2]": [a, "--api-key", "the run sets these"]})
        for a in ("--port=3", "--tp", "--api-k=x", "--enable-dp-attention", "--expert-parallel-s",
                  "--preferred-sampling-params=x", "--preferred-s", "--enable-watermark")
    ),
    *(
        Case([*URLS, f"rollout.urls=['{url}']"], {"rollout.urls[0]": [f"{url} | http://host:port"]})
        for url in ("a:1", "ftp://a:1", "http://a", "http://a:x", "http://a:99999", "http://:1",
                    "http://a:1/generate", "http://me:secret@a:1", "http://[::1:3", "http://a:1?x=1")
    ),
    Case(["sync.backend=nccl"], {"sync.backend": ["shares its device", "rollout.urls"]},
         num_gpus=8),
    Case(["sync.backend=nccl", *URLS], {"sync.backend": ["with 0", "or 8"]}, num_gpus=0),
    Case([], {"parallel": ["8 ranks for 7 GPUs", "a GPU for every rank"]}, num_gpus=7),
]  # fmt: skip

FILES = [
    Case(["model.hf=HERE/nowhere"], {"model.hf": ["nowhere, which does not exist", "downloaded"]}),
    Case(["model.hf=HERE/prompts.jsonl"], {"model.hf": ["which is no folder"]}),
    Case(["model.load=HERE/nowhere"], {"model.load": ["which does not exist", "checkpoint"]}),
    Case(["data.prompts=HERE/nowhere"], {"data.prompts": ["nowhere, which does not exist"]}),
    Case(["data.prompts=HERE/empty.jsonl"], {"data.prompts": ["which is empty", "at least one"]}),
    Case(["data.prompts=HERE/model"], {"data.prompts": ["which is no file"]}),
    Case(["data.heldout=HERE/no", "eval.every=1"], {"data.heldout": ["does not exist"]}),
    Case(["data.demonstrations=HERE/no"], {"data.demonstrations": ["does not exist"]}, "sft"),
    Case(["model.load=HERE/rollouts"], {"model.load": ["rollouts without megatron/"]}),
    Case(["data.recorded=HERE/no"], {"data.recorded": ["does not exist", "to step_10.npz"]},
         "train_only"),
    Case(["data.recorded=HERE/model"], {"data.recorded": ["0 recorded steps, without step 1"]},
         "train_only"),
    Case(["run.steps=11"], {"data.recorded": ["10 recorded steps, without step 11"]}, "train_only"),
    Case(["rollout.key_file=HERE/no"], {"rollout.key_file": ["no file", "with the key"]}),
    Case(["rollout.engine=sglang", "rollout.server_command=[HERE/python]"],
         {"rollout.server_command": ["which is no program here"]}),
    Case(["run.dir=HERE/prompts.jsonl/run"], {"run.dir": ["prompts.jsonl is a file"]}),
    Case(["run.dir=HERE/old_run"], {"run.dir": ["already holds a run", "run.resume=true"]}),
    Case(["run.resume=true"], {"run.resume": ["holds no run", "false for a new run"]}),
]  # fmt: skip


@pytest.mark.parametrize("case", VALID, ids=str)
def test_a_valid_run_has_no_problem(case: Case, place: Path) -> None:
    assert found_problems(case, place) == []


@pytest.mark.parametrize("case", [*LAYOUT, *SETTINGS, *FILES], ids=str)
def test_a_contradiction_alone_gives_exactly_its_problem(case: Case, place: Path) -> None:
    assert_exactly(case, place)


def test_all_contradictions_are_reported_at_once(place: Path) -> None:
    case = Case(
        [*URLS, "optim.betas=[2,2]", "algo.minibatches=3", "rollout.urls=[x]", "data.prompts=/no"],
        {
            **{"parallel": ["= 8"], "parallel.pp": ["= 5"], "data.prompts_per_step": ["32"]},
            **{
                "optim.betas[0]": [],
                "optim.betas[1]": [],
                "rollout.urls[0]": [],
                "data.prompts": [],
            },
        },
        world_size=3,
        hf={"num_hidden_layers": 5},
    )
    assert_exactly(case, place)


@pytest.mark.parametrize(
    "file, words",
    [
        ("config.json", "without config.json"),
        ("tokenizer.json", "without a tokenizer"),
        ("model.safetensors", "without *.safetensors"),
    ],
)
def test_an_incomplete_model_folder_says_what_is_missing(
    place: Path, file: str, words: str
) -> None:
    (place / "model" / file).unlink()
    assert_exactly(Case([], {"model.hf": [words]}), place)


def test_with_a_checkpoint_only_a_managed_server_needs_weights_in_the_folder(place: Path) -> None:
    (place / "model" / "model.safetensors").unlink()
    load = "model.load=HERE/checkpoint"
    assert found_problems(Case([load, *URLS], {}), place) == []
    assert found_problems(Case([load], {}, "sft"), place) == []
    assert_exactly(Case([load], {"model.hf": ["the managed server starts with them"]}), place)


def test_a_broken_config_json_is_one_problem_and_reads_as_none(place: Path) -> None:
    (place / "model" / "config.json").write_text("{")
    assert_exactly(Case([], {"model.hf": ["config.json, which does not parse"]}), place)
    assert read_hf_config(place / "model") is None


def test_paths_are_not_looked_at_where_they_cannot_be(place: Path) -> None:
    config = load_config([], [*base(place, "rl"), "model.hf=/nowhere", "data.prompts=/nowhere"])
    validate(config, world_size=8, num_gpus=0, hf_config=None, check_paths=False)


def test_optimizer_steps_count_minibatches(place: Path) -> None:
    assert optimizer_steps(load_config([], [*base(place, "rl"), "algo.minibatches=4"])) == 40
