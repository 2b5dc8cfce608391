"""Where servers of ours listen."""

import socket

from megarl.rollout.process import LOOPBACK
from megarl.types import Job


def server_address(job: Job) -> str:
    """Where a server of ours listens: nowhere but here when all ranks are here, else where the
    launcher has told every rank to find rank 0, which starts it."""
    return LOOPBACK if job.nodes == 1 else socket.gethostbyname(job.master_address)
