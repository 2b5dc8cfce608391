"""The ``megarl`` command. Imports that take time are inside the commands, so that help is instant.

Exit codes: 0 done, 1 the thing looked at has failed, 2 wrong settings or usage. Errors that are
meant for the user are printed without a traceback.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megarl.cli_arguments import Arguments, load
from megarl.cli_servers import app as servers_app

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.monitor.first_error import Cause
    from megarl.monitor.samples import SampleText
    from megarl.rundir import RunDir

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of large mixture-of-experts models.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at and check settings.")
app.add_typer(config_app, name="config")
app.add_typer(servers_app)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def main() -> None:
    """Console entry point."""
    from megarl.errors import ConfigError, MegarlError

    try:
        app()
    except MegarlError as e:
        typer.echo(f"megarl: {e}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)


@config_app.command("show")
def config_show(
    arguments: Arguments,
    given: Annotated[bool, typer.Option("--given", help="Only what was set.")] = False,
) -> None:
    """Print the resolved configuration as YAML: every setting, defaults included."""
    import yaml

    from megarl.config.load import dump_given, dump_resolved

    config = load(arguments)
    # Both forms name every setting once; YAML keeps the order of the schema.
    text = (
        dump_given(config)
        if given
        else yaml.safe_dump(json.loads(dump_resolved(config)), sort_keys=False, allow_unicode=True)
    )
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


@config_app.command("check")
def config_check(
    arguments: Arguments,
    shell: Annotated[
        bool, typer.Option("--shell", help="Print what a launch script needs instead: NPROC=...")
    ] = False,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks there will be; default: as many as the layout says.")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(help="Devices of the whole job; default: NODES times those here.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the job, all like this machine.")] = 1,
    paths: Annotated[bool, typer.Option(help="Look for the files that settings name.")] = True,
) -> None:
    """Check settings against each other, the model and the disk; print what they amount to.

    Exits with 2 and every problem found if there is one.
    """
    from megarl.config.failures import launch_of
    from megarl.config.files import read_hf_config
    from megarl.config.validate import validate
    from megarl.installed import installed
    from megarl.models.spec import FAMILIES, REFUSED

    config = load(arguments)
    hf_config = read_hf_config(config.model.hf)
    validate(
        config,
        world_size=world_size,
        num_gpus=_local_gpus() * nodes if num_gpus is None else num_gpus,
        hf_config=hf_config,
        critic_hf_config=read_hf_config(config.critic.hf) if config.critic.hf else None,
        server_hf_config=read_hf_config(config.server_hf),
        supported_models=FAMILIES,
        refused_models=REFUSED,
        check_paths=paths,
        packages=installed() if num_gpus is None else None,
    )
    if hf_config is not None:
        _check_model(config)
    if shell:
        typer.echo(f"NPROC={_world_size(config)}")
        typer.echo(f"RUN_DIR={shlex.quote(str(config.run.dir))}")
        launch = launch_of(config, os.environ)
        typer.echo(f"RESTARTS={launch.restarts}")
        typer.echo(f"SERVERS={int(launch.servers)}")
    else:
        typer.echo(_summary(config))


@config_app.command("docs")
def config_docs() -> None:
    """Print a markdown table of every setting (docs/configuration.md)."""
    from megarl.config.docs import configuration_markdown

    typer.echo(configuration_markdown(), nl=False)


@app.command()
def samples(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Only this step; default: the newest.")] = None,
    last: Annotated[int | None, typer.Option(help="The last K kept samples of all steps.")] = None,
    prompt: Annotated[str, typer.Option(help="Only prompts that contain this text.")] = "",
) -> None:
    """Show kept samples of a run: prompt, response, expected answer, reward."""
    from megarl.errors import DataError
    from megarl.monitor.samples import read_samples, sample_steps
    from megarl.rundir import RunDir

    folder = RunDir(run).samples
    steps = sample_steps(folder) if folder.is_dir() else []
    if not steps:
        raise DataError(f"{folder} holds no samples (monitor.samples_per_step keeps them)")
    if step is not None and step not in steps:
        raise DataError(f"{folder} has no step {step}; there are {steps[0]} to {steps[-1]}")
    chosen = [step] if step is not None else steps if last is not None or prompt else steps[-1:]
    found = [s for n in chosen for s in read_samples(folder, n) if prompt in s.prompt]
    for sample in found[-last:] if last else found:
        _print_sample(sample)
    if not found:
        typer.echo(f"no kept sample has {prompt!r} in its prompt", err=True)


@app.command()
def report(run: RunArgument) -> None:
    """Rebuild report.html of a run from its files."""
    from megarl.errors import DataError
    from megarl.monitor.report import write_report
    from megarl.rundir import RunDir

    if not run.is_dir():
        raise DataError(f"{run} is no run directory")
    typer.echo(str(write_report(RunDir(run))))


@app.command("first-error")
def first_error(
    run: RunArgument,
    launch: Annotated[
        str | None, typer.Option(help="A start's id (torchrun --rdzv-id); default: the newest.")
    ] = None,
) -> None:
    """Print the error that made a run fail: the earliest that is not the echo of another.

    Exits with 1 if there is one.
    """
    from megarl.rundir import RunDir

    cause = _cause(RunDir(run, launch) if launch else RunDir(run).last_launch())
    if cause is not None:
        typer.echo(cause.text)
        raise typer.Exit(1)


@app.command("go-on")
def go_on(
    run: RunArgument,
    launch: Annotated[
        str | None, typer.Option(help="The start (torchrun --rdzv-id) that has failed.")
    ] = None,
) -> None:
    """Print the settings with which a run that has failed goes on, for launch scripts.

    That is run.resume=true where it has a checkpoint. Where it has none it starts anew: what it has
    written is moved to attempts/ in the run directory. Exits with 1, and does nothing, if LAUNCH
    failed of settings, data or installation, which a restart does not mend, or the run is in use.
    """
    from megarl.checkpoint.manager import CheckpointManager
    from megarl.rundir import RunDir

    rundir = RunDir(run)
    cause = _cause(RunDir(run, launch)) if launch else None
    if cause is not None and cause.lasting:
        typer.echo(f"not started again: a restart does not mend this ({cause.name})", err=True)
        raise typer.Exit(1)
    if cause is not None:
        typer.echo(f"a restart may mend this ({cause.name})", err=True)
    if CheckpointManager.complete_steps(rundir.checkpoints):
        typer.echo("run.resume=true")
        return
    with rundir.lock():  # not under a run that lives
        folder = rundir.set_aside()
    if folder is not None:
        typer.echo(f"no checkpoint yet: the start before is now in {folder}", err=True)


@app.command()
def doctor() -> None:
    """Show what this machine has and what would go wrong with it.

    Exits with 1 if something would.
    """
    from megarl.monitor.doctor import examine

    findings = examine()
    width = max(len(f.name) for f in findings)
    colours = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "bad": typer.colors.RED}
    for f in findings:
        state = typer.style(f"{f.state:4}", fg=colours[f.state])
        typer.echo(f"{state}  {f.name:{width}}  {f.detail}")
    if any(f.state == "bad" for f in findings):
        raise typer.Exit(1)


@app.command()
def plan(
    arguments: Arguments,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the trainer, one a rank.")],
    gpu_memory: Annotated[float, typer.Option(min=1, help="GiB of each.")] = 80.0,
    sample_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Mean length, prompt included. Default: each fills a row."),
    ] = None,
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        typer.Option(help="Instead of what the settings say."),
    ] = None,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="As if its state were on the host.")
    ] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="As if precision.fp8 were set.")] = False,
    suggestions: Annotated[int, typer.Option(min=0, help="Layouts to suggest.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a record instead; -: to stdout.")
    ] = None,
) -> None:
    """Memory, traffic and idle time of a model in a layout, and layouts that fit; nothing starts.

    A file of configs/models/ is enough. Exits with 1 if it does not fit, with 2 and every reason
    if the model cannot be split so.
    """
    from megarl.plan.job import layout_of, plan_job, read_job, what_if
    from megarl.plan.search import suggest

    job = read_job(arguments, gpus=gpus, gpu_gib=gpu_memory, sample_tokens=sample_tokens, fp8=fp8)
    choices, ways = what_if(job, recompute, offload_optimizer=offload_optimizer)
    planned = plan_job(job, layout_of(job), choices)
    found = suggest(job, ways, suggestions) if suggestions else None
    if json_file is None:
        from rich.console import Console

        from megarl.plan.table import print_plan

        print_plan(planned, found, Console())
    else:
        from megarl.plan.record import as_record

        text = json.dumps(as_record(planned, found), indent=1)
        if str(json_file) == "-":
            typer.echo(text)
        else:
            json_file.write_text(text + "\n")
    if not planned.fits:
        raise typer.Exit(1)


def _check_model(config: "Config") -> None:
    """Everything in config.json that a model family does not support, or ``model.config`` says
    otherwise, parameters to freeze that the model does not have, and in what ``rollout.model`` is
    another one.
    """
    from megarl.config.files import read_hf_config
    from megarl.errors import ConfigError, DataError
    from megarl.models.frozen import frozen_parameters
    from megarl.models.served import served_form
    from megarl.models.settings import model_spec
    from megarl.models.spec import read_spec

    key = "model.hf"
    try:
        spec = model_spec(config.model)
        frozen_parameters(config.train.frozen, spec)
        if config.rollout.model is not None and read_hf_config(config.rollout.model) is not None:
            key = "rollout.model"
            served_form(config, spec)
        if config.critic.hf is not None:
            key = "critic.hf"
            read_spec(config.critic.hf, for_values=True)
    except DataError as e:
        typer.echo(f"megarl: {key}: {e}", err=True)
        raise typer.Exit(2) from e
    except ConfigError as e:
        typer.echo(f"megarl: {e}", err=True)
        raise typer.Exit(2) from e


def _cause(start: "RunDir") -> "Cause | None":
    from megarl.monitor.first_error import cause_of

    logs = [log.read_text("utf-8", "replace") for log in start.torchrun_logs()]
    return cause_of(start.errors, logs)


def _local_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _world_size(config: "Config") -> int:
    p = config.parallel
    return p.tp * p.pp * p.cp * p.dp


def _summary(config: "Config") -> str:
    from megarl.config.training import optimizer_steps

    p, run, data = config.parallel, config.run, config.data
    per_step = {
        "rl": f"{data.prompts_per_step} prompts x {data.samples_per_prompt} samples a step",
        "sft": f"{data.prompts_per_step} demonstrations a step",
        "train_only": f"rollouts of {data.recorded}",
    }[run.mode]
    layout = f"tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.dp}"
    experts = f", ep {p.ep} x etp {p.etp or p.tp} for experts" if p.ep > 1 or p.etp else ""
    steps = f"{run.steps} steps, {optimizer_steps(config)} optimizer steps"
    return "\n".join(
        (
            "the configuration is consistent",
            f"  world size {_world_size(config)} = {layout}{experts}",
            f"  {run.mode}: {steps}; {per_step}",
            f"  {config.algo.policy.name}, lr {config.optim.lr:g}, {config.precision.dtype}",
            f"  run directory {run.dir}",
        )
    )


def _print_sample(sample: "SampleText") -> None:
    from megarl.monitor.samples import describe, printable

    colour = typer.colors.GREEN if sample.correct else typer.colors.RED
    typer.secho(printable(describe(sample)), bold=True, fg=colour)
    for label, text in (
        ("prompt", sample.prompt),
        ("response", sample.response),
        ("expected", sample.answer),
    ):
        indented = printable(text).replace("\n", "\n            ")
        typer.echo(f"  {label:8}  {indented}")
    typer.echo()


if __name__ == "__main__":
    main()
