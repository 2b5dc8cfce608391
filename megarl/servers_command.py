"""`megarl servers`: checks the configuration and hands over to `rollout/supervisor.py`."""

import logging
import sys

from megarl.config.files import read_hf_config
from megarl.config.schema import Config
from megarl.config.served import served_dtype
from megarl.config.validate import validate
from megarl.errors import ConfigError, Problem
from megarl.models.spec import FAMILIES, REFUSED
from megarl.rollout.supervisor import supervise
from megarl.rundir import RunDir


def main(config: Config, *, host: str, parent_pid: int | None) -> None:
    """Returns once it was told to end. Raises ConfigError, ServerError when no server is left."""
    for key, value in (("run.mode", config.run.mode), ("rollout.urls", config.rollout.urls)):
        if value not in ("rl", ()):
            accepted = "rl, and no urls: `megarl servers` starts the servers of a run"
            raise ConfigError([Problem(key, str(value), accepted)])
    p = config.parallel
    validate(
        config,
        world_size=None,
        num_gpus=p.tp * p.pp * p.cp * p.dp,  # the trainer's, wherever they are
        hf_config=read_hf_config(config.model.hf),
        server_hf_config=read_hf_config(config.server_hf),
        supported_models=FAMILIES,
        refused_models=REFUSED,
    )
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    supervise(
        config.rollout,
        run_dir=RunDir(config.run.dir),
        model=config.server_hf,
        dtype=served_dtype(config),
        host=host,
        routing=config.moe.routing_replay == "rollout",
        max_restarts=config.on_failure.max_restarts,
        parent_pid=parent_pid,
    )
