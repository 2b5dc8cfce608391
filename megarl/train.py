"""What torchrun starts: ``torchrun -m megarl.train CONFIG... [key=value ...]``, one process a
trainer rank.

Checks the whole configuration before anything is started, joins the job, and hands over to
``loop.run``. An error becomes ``errors/rank_N.json`` in the run directory (``megarl first-error
RUN`` reads them) and a non-zero exit.
"""

import contextlib
import datetime
import logging
import os
import sys
import traceback

import torch
import torch.distributed as dist

from megarl.config.files import read_hf_config
from megarl.config.fp8 import set_te_environment
from megarl.config.load import load_config, split_arguments
from megarl.config.schema import Config
from megarl.config.validate import validate
from megarl.errors import ConfigError, InstallError, MegarlError
from megarl.hostcomm import allow_connections
from megarl.installed import installed, require_sound
from megarl.models.frozen import frozen_parameters
from megarl.models.served import served_form
from megarl.models.settings import model_spec
from megarl.models.spec import FAMILIES, REFUSED
from megarl.rundir import RunDir
from megarl.stopping import StopRequest
from megarl.types import Job

log = logging.getLogger(__name__)


def job_from_environment() -> Job:
    """This process's place in the job, as torchrun tells it."""
    get = os.environ.get
    return Job(
        rank=int(get("RANK", "0")),
        local_rank=int(get("LOCAL_RANK", "0")),
        world_size=int(get("WORLD_SIZE", "1")),
        local_world_size=int(get("LOCAL_WORLD_SIZE", "1")),
        launch=get("TORCHELASTIC_RUN_ID", str(os.getpid())),  # torchrun's --rdzv-id
        master_address=get("MASTER_ADDR", "127.0.0.1"),
    )


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 done, 2 wrong configuration or installation, 1 any other error, 128 + signal
    when stopped before the end.
    """
    job, config = job_from_environment(), None
    try:
        config = load_config(*split_arguments(sys.argv[1:] if arguments is None else arguments))
        check(config, job)
    except (ConfigError, InstallError) as e:
        if job.rank == 0:
            print(f"megarl: {e}", file=sys.stderr, flush=True)
        if config is not None and config.run.dir.is_dir():  # a launcher has made it, and reads it
            with contextlib.suppress(OSError):
                RunDir(config.run.dir, job.launch).record_error(job.rank, "start", e)
        return 2
    rundir = RunDir(config.run.dir, job.launch)
    stop = StopRequest(config.run.stop_grace_s)
    try:
        _log_to(rundir, job.rank)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _join(job, config)
        set_te_environment(config.precision.fp8, os.environ)
        # Megatron takes seconds to import: only once the configuration is right.
        from megarl.loop import run

        run(config, rundir, job, stop)
    except BaseException as e:  # some of torch's errors are no Exception
        rundir.record_error(job.rank, stop.where, e)
        log.error("%s", e if isinstance(e, MegarlError) else traceback.format_exc())
        _leave(stop, 1)
    return stop.exit_code


def check(config: Config, job: Job) -> None:
    """Raise ConfigError with every problem of this configuration in this job of like nodes, and
    InstallError for packages that would break Megatron.
    """
    require_sound()
    validate(
        config,
        world_size=job.world_size,
        num_gpus=torch.cuda.device_count() * job.nodes,
        hf_config=read_hf_config(config.model.hf),
        critic_hf_config=read_hf_config(config.critic.hf) if config.critic.hf else None,
        server_hf_config=read_hf_config(config.server_hf),
        supported_models=FAMILIES.keys(),
        refused_models=REFUSED,
        packages=installed(),
    )
    if config.train.frozen:
        frozen_parameters(config.train.frozen, model_spec(config.model))
    if config.run.mode == "rl" and config.rollout.model is not None:
        served_form(config, model_spec(config.model))


def _join(job: Job, config: Config) -> None:
    if job.world_size == 1 and "MASTER_ADDR" not in os.environ:
        return  # one process without a launcher: setup.py makes a group of one
    allow_connections()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=config.run.timeout_s))


def _log_to(rundir: RunDir, rank: int) -> None:
    """Every rank to its own file, rank 0's warnings to the terminal as well."""
    rundir.logs.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(rundir.logs / f"rank_{rank}.log")
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.ERROR)
        handlers.append(terminal)
    form = f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
    logging.captureWarnings(True)


def _leave(stop: StopRequest, code: int) -> None:
    """End now: after an error other ranks may be gone, and tidy endings (NCCL, gloo) would wait for
    them.
    """
    stop.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(stop.exit_code or code)


if __name__ == "__main__":
    sys.exit(main())
