"""A job's environment, with stand-ins for Slurm's commands and for Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm" / "train.sbatch"
LOCAL = ROOT / "launch" / "local.sh"
JOB = "4711"

# One text under every name: what it is called decides what it stands in for. All write down that
# they were called.
STAND_IN = """\
#!{python}
import json, os, re, signal, subprocess, sys, time
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]

def called(*words):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([name, *words]) + "\\n")

def ended(*_):
    called("servers ended")
    sys.exit(0)

if "servers" in arguments:  # whoever has seen the call may end it
    signal.signal(signal.SIGTERM, ended)
called(*arguments)
if name == "scontrol":
    print("\\n".join("node%d" % i for i in range(int(os.environ["SLURM_JOB_NUM_NODES"]))))
elif name == "srun":
    command = arguments[arguments.index("bash"):]
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    job = {{**os.environ, "SLURM_NNODES": nodes}}
    running = [
        subprocess.Popen(command, env={{**job, "SLURM_NODEID": str(i)}}) for i in range(int(nodes))
    ]
    sys.exit(max(p.wait() for p in running))
elif "check" in arguments:
    print("NPROC=" + os.environ["NPROC"])
    print("RUN_DIR={run_dir}")
    print("RESTARTS=" + os.environ.get("RESTARTS", "0"))
    print("SERVERS=" + os.environ.get("SERVERS", "0"))
elif arguments[0] == "-c":
    print("10.0.0.7")
elif "torch.distributed.run" in arguments:
    time.sleep(float(os.environ.get("SECONDS_OF_TRAINING", "0")))
    launch = next(a for a in arguments if a.startswith("--rdzv-id="))
    again = re.search(r"-r(\\d+)$", launch)
    attempt = int(again[1]) if again else 0
    statuses = os.environ.get("STATUS", "0").split(",")
    sys.exit(int(statuses[min(attempt, len(statuses) - 1)]))
elif "go-on" in arguments:
    if "GO_ON_FAILS" in os.environ:
        print("not started again", file=sys.stderr)
        sys.exit(1)
    print(os.environ.get("GO_ON", "run.resume=true"))
elif "servers" in arguments:
    time.sleep(float(os.environ.get("SECONDS_OF_SERVING", "60")))
    sys.exit(1)
"""


# Launchers sleep a second at a time.
SLEEP = """\
#!/bin/bash
echo "[\\"sleep\\", \\"$1\\"]" >>'{calls}'
exec /bin/sleep "${{SECONDS_OF_SLEEP:-0}}"
"""


class Cluster:
    """A job's environment, with stand-ins for Slurm's commands and for Python."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "a run"
        self.calls_file = folder / "calls"
        (folder / "bin").mkdir()
        run_dir = str(self.run_dir).replace(" ", "\\\\ ")
        text = STAND_IN.format(python=sys.executable, calls=str(self.calls_file), run_dir=run_dir)
        for name in ("srun", "scontrol", "scancel", "python"):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "bin" / "sleep").write_text(SLEEP.format(calls=self.calls_file))
        (folder / "bin" / "sleep").chmod(0o755)
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(folder / "bin" / "python"),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_SUBMIT_DIR": str(folder),
        }

    def start(
        self, *arguments: str, ranks: int = 4, script: Path = SCRIPT, **more: str
    ) -> subprocess.Popen[str]:
        environment = {**self.environment, "NPROC": str(ranks), **more}
        command = ["bash", str(script), *arguments]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def submit(
        self, *arguments: str, ranks: int = 4, script: Path = SCRIPT, **more: str
    ) -> tuple[int, str]:
        """Exit code and standard error of the whole job."""
        job = self.start(*arguments, ranks=ranks, script=script, **more)
        _, errors = job.communicate(timeout=30)
        return job.returncode, errors

    def calls(self, word: str) -> list[list[str]]:
        """All calls that have ``word`` in them."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [call for call in map(json.loads, lines) if word in call]


def option(call: list[str], name: str) -> str:
    return next(a.removeprefix(f"{name}=") for a in call if a.startswith(f"{name}="))
