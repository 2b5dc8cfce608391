"""Commands that serve: ``megarl serve`` and ``megarl servers``."""

from pathlib import Path
from typing import Annotated

import typer

from megarl.cli_arguments import Arguments, load

app = typer.Typer()


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 0,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of every request; made if missing.")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Written once requests are taken: url, pid, host.")
    ] = None,
    max_running: Annotated[int, typer.Option(help="Sequences decoded together.")] = 256,
    context_length: Annotated[int, typer.Option(help="Tokens of the longest sequence.")] = 64,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    fixed_shape: Annotated[
        bool, typer.Option(help="Always compute full batches: bits do not depend on neighbours.")
    ] = True,
    fp8: Annotated[
        str, typer.Option(help="Compute as with FP8 weights, scales f32 or power_of_two.")
    ] = "none",
    parent_pid: Annotated[int | None, typer.Option(help="End when this process has ended.")] = None,
) -> None:
    """Serve a model with the embedded server: SGLang's HTTP protocol on transformers."""
    from megarl.serve import main as serve_main

    status: int = serve_main(
        model=model,
        host=host,
        port=port,
        key_file=key_file,
        ready_file=ready_file,
        max_running=max_running,
        context_length=context_length,
        dtype=dtype,
        fixed_shape=fixed_shape,
        fp8=fp8,
        parent_pid=parent_pid,
    )
    raise typer.Exit(status)


@app.command()
def servers(
    arguments: Arguments,
    host: Annotated[
        str, typer.Option(help="Address of this machine to listen on, as trainers reach it.")
    ] = "127.0.0.1",
    parent_pid: Annotated[int | None, typer.Option(help="End when this process has ended.")] = None,
) -> None:
    """Run the rollout servers of a configuration, for trainers with rollout.discover=true.

    They are started again when they fail, and end with this command (SIGTERM, Ctrl-C). Exits with
    1 when no server is left.
    """
    from megarl.servers_command import main as servers_main

    servers_main(load(arguments), host=host, parent_pid=parent_pid)


@app.command("sglang-plugin")
def sglang_plugin() -> None:
    """Print what installs our plugin into the environment of an SGLang server that you start.

    Without it no server of that kind is taken. Servers that megarl starts have it by themselves.
    """
    from megarl.rollout.features import plugin_command

    typer.echo(plugin_command())
