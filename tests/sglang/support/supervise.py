"""Runs a command in a process group of its own, and ends that group with whoever asked for it.

    python supervise.py PARENT_PID COMMAND...

The group is killed when the parent is gone, however it went (killed, crashed, finished without
cleaning up), when this process gets SIGTERM, and when the command itself ends. Polling the parent's
pid covers what a handler in the parent cannot, and the process group covers grandchildren, also
while they are still starting. The command's temporary files go into a folder that is removed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    told_to_stop = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.append(True))
    with tempfile.TemporaryDirectory(prefix="sgl-", ignore_cleanup_errors=True) as tmp:
        env = {**os.environ, "TMPDIR": tmp}
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, process_group=0)
        while child.poll() is None and os.getppid() == parent and not told_to_stop:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # all of it may be gone by itself
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
