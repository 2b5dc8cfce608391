"""Where servers of ours listen, and this machine as a server sees it."""

import socket
from urllib.parse import urlsplit

from megarl.rollout.process import LOOPBACK
from megarl.types import Job


def server_address(job: Job) -> str:
    """Where a server of ours listens: nowhere but here when all ranks are here, else where the
    launcher has told every rank to find rank 0, which starts it."""
    return LOOPBACK if job.nodes == 1 else socket.gethostbyname(job.master_address)


def address_towards(url: str) -> str:
    """This machine's address as the server at ``url`` sees it."""
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: sends nothing, only looks up the route
        return str(probe.getsockname()[0])
