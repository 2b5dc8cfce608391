"""What commands take that read a configuration."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megarl.config.schema import Config

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES... [KEY=VALUE...]",
        help="YAML files, merged left to right, then overrides such as optim.lr=1e-5.",
        show_default=False,
    ),
]


def load(arguments: list[str]) -> "Config":
    """Raises ConfigError."""
    from megarl.config.load import load_config, split_arguments

    return load_config(*split_arguments(arguments))
