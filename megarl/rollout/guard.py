"""Runs a server that knows nothing of us: `python -m megarl.rollout.guard PARENT KEY_FILE
COMMAND...`

1. What the server prints goes on to our stdout with the key blacked out: SGLang logs its arguments.
2. SIGTERM is passed on. When the process PARENT ends, so does the server: SIGTERM to its process
   group, SIGKILL three seconds later. The guard leads that group (whoever starts it makes it a
   session).
3. The exit status is the server's; death by a signal becomes death by the same signal.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from megarl.rollout.process import follow_parent, read_key

GRACE_S = 3.0


def main(arguments: list[str]) -> int:
    parent_pid, key_file, command = int(arguments[0]), Path(arguments[1]), arguments[2:]
    key = read_key(key_file).encode()
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent(parent_pid, _end_group)
    assert server.stdout is not None
    copier = threading.Thread(target=_copy, args=(server.stdout, key), daemon=True)
    copier.start()
    status = server.wait()
    copier.join(1.0)  # children of the server may hold the pipe open
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    return status


def _copy(source: BinaryIO, key: bytes) -> None:
    """Line by line: a key is never cut in two."""
    with contextlib.suppress(BrokenPipeError):
        for line in source:
            sys.stdout.buffer.write(line.replace(key, b"***"))
            sys.stdout.buffer.flush()


def _end_group() -> None:
    signal_group = os.getpgid(0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(signal_group, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(signal_group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
