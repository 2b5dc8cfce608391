"""A server program for tests of the fleet: starts in a moment, and misbehaves when told to.

`python standin.py --config KEYFILE.yaml --host H --port P ...`: what a fleet gives SGLang. In the
folder of the program:

* `hang`: while it exists nothing that takes work is answered; `/health` is.
* `hang_generate`: `/generate` is not, everything else is.
* `refuse`: `/health_generate` says 503.
* `fail`: a new process ends at once with exit code 7.
* `info.json`: what `/server_info` says; `argv.json` is written: what it was started with.
* `calls`: every request, a line each.
"""

import http.server
import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
WORK = ("/health_generate", "/generate")


class Handler(http.server.BaseHTTPRequestHandler):
    key = ""
    boot = f"{os.getpid()}-{time.time_ns()}"

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer()

    def answer(self) -> None:
        with (HERE / "calls").open("a") as calls:
            calls.write(f"{self.path}\n")
        if self.headers["Authorization"] != f"Bearer {self.key}":
            return self.say(401, {})
        work = self.path in WORK
        while (work and (HERE / "hang").exists()) or (
            self.path == "/generate" and (HERE / "hang_generate").exists()
        ):
            time.sleep(0.02)
        if work and (HERE / "refuse").exists():
            return self.say(503, {"error": "not now"})
        info = HERE / "info.json"
        self.say(
            200,
            {
                "version": "0.5.23",
                "startup_time": self.boot,
                "weight_version": "0",
                "output_ids": [3],
                **(json.loads(info.read_text()) if info.exists() else {}),
            },
        )

    def say(self, status: int, body: object) -> None:
        try:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())
        except OSError:  # whoever asked has left
            return

    def log_message(self, *_: object) -> None:
        return


def main(arguments: list[str]) -> None:
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    (HERE / "argv.json").write_text(json.dumps(arguments))
    if (HERE / "fail").exists():
        print("cannot start today", flush=True)
        sys.exit(7)
    Handler.key = json.loads(Path(options["--config"]).read_text())["api-key"]
    address = (options["--host"], int(options["--port"]))
    print("listening", flush=True)
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
