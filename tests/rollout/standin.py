"""A server program for tests of the fleet: starts in a moment, and misbehaves when told to.

`python standin.py --config KEYFILE.yaml --host H --port P ...`: what a fleet gives SGLang. In the
folder of the program:

* `hang`: while it exists nothing that takes work is answered; `/health` is.
* `busy`: while it exists `/server_info` tells of steps that are computed.
* `hang_generate`: `/generate` is not, everything else is.
* `old`: what others call `/server_info` and `/model_info` is `/get_server_info` and so on.
* `paused`: likewise `hang`, until `/continue_generation`, which removes it.
* `refuse`: `/health_generate` says 503.
* `fail`: a new process ends at once with exit code 7.
* `response.json`: what its responses say instead of what they would, by key.
* `info.json`: what `/server_info` says; `argv.json` is written: what it was started with.
* `gone`: paths of requests that were given up before they were answered.
* `calls`: every request, a line each: its port, method, path and body.

As SGLang does, it asks for its key except at `/health`.
"""

import http.server
import json
import os
import select
import socket
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
        length = int(self.headers.get("Content-Length") or 0)
        self.answer(self.rfile.read(length).decode())

    def response(self, rid: str) -> dict[str, object]:
        """One sampled token, or what `response.json` makes of it."""
        file = HERE / "response.json"
        told = json.loads(file.read_text()) if file.exists() else {}
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": 1},
            "output_token_logprobs": [[-0.5, 3, None]],
            "weight_version": "0",
        }
        meta |= {key: value for key, value in told.items() if key in meta}
        return {"output_ids": told.get("output_ids", [3]), "meta_info": meta}

    def answer(self, body: str = "") -> None:
        port = self.server.server_address[1]
        with (HERE / "calls").open("a") as calls:
            calls.write(f"{port} {self.command} {self.path} {body}\n")
        if self.path != "/health" and self.headers["Authorization"] != f"Bearer {self.key}":
            return self.say(401, {})
        work = self.path in WORK
        if self.path == "/continue_generation":
            (HERE / "paused").unlink(missing_ok=True)
        stops = [HERE / "hang", HERE / "paused"]
        while (work and any(stop.exists() for stop in stops)) or (
            self.path == "/generate" and (HERE / "hang_generate").exists()
        ):
            time.sleep(0.02)
            if self.hung_up():
                with (HERE / "gone").open("a") as gone:
                    gone.write(f"{self.path}\n")
                return None
        if work and (HERE / "refuse").exists():
            return self.say(503, {"error": "not now"})
        if self.path in ("/server_info", "/model_info") and (HERE / "old").exists():
            return self.say(404, {})
        if self.path == "/generate":
            rids = json.loads(body)["rid"]
            several = isinstance(rids, list)
            return self.say(200, list(map(self.response, rids)) if several else self.response(rids))
        info = HERE / "info.json"
        self.say(
            200,
            {
                "version": "0.5.23",
                "startup_time": self.boot,
                "weight_version": "0",
                "internal_states": [{"megarl_plugin": "0.3.0"}],
                "steps": time.time_ns() if (HERE / "busy").exists() else 1,
                **(json.loads(info.read_text()) if info.exists() else {}),
            },
        )

    def hung_up(self) -> bool:
        """Whether the caller has closed the connection."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

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
