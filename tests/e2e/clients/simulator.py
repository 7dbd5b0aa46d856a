"""The simulated cloud: an unmodified `ciranda sim` process, and its control endpoint."""

import json
import queue
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request

# Seconds: what the simulator gives itself for either (lua/ciranda/sim/init.lua) and a little more, so
# that it is the one who says what has gone wrong. To end is to remove all its files, on whatever disk.
START_DEADLINE = 130
STOP_DEADLINE = 410

# The control endpoint is asked directly, whatever proxies the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Simulator:
    """A running simulator. `env` has the variables that it prints, `url` is where its services are,
    `scale` how many of its seconds are one.
    """

    def __init__(self, binary, *flags):
        self.scale = int(flags[flags.index("--scale") + 1]) if "--scale" in flags else 60
        self.process = subprocess.Popen(
            [binary, "sim", "--events=false", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.env = self._read_environment()
        except BaseException:
            self.close()
            raise
        self.url = self.env["CIRANDA_SIM_URL"]
        self.host = self.url.removeprefix("http://")
        self.project = self.env["CLOUDSDK_CORE_PROJECT"]
        self.zone = self.env["CLOUDSDK_COMPUTE_ZONE"]
        self.parent = f"projects/{self.project}/locations/{self.zone}"

    def _read_environment(self):
        lines = queue.Queue()

        def read():
            for line in self.process.stdout:
                lines.put(line.strip())
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        env, limit = {}, time.monotonic() + START_DEADLINE
        while True:
            try:
                line = lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(
                    f"`ciranda sim` was not ready after {START_DEADLINE} s"
                ) from None
            if line is None:
                raise RuntimeError(f"`ciranda sim` ended with status {self.process.wait()}")
            if line == "ready":
                return env
            for word in shlex.split(line.removeprefix("export ")):
                name, _, value = word.partition("=")
                env[name] = value

    def control(self, verb, path, body=None):
        """Call /sim/v1/PATH; what is refused raises RuntimeError with the simulator's words."""
        request = urllib.request.Request(
            f"{self.url}/sim/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=verb,
        )
        try:
            with _DIRECT.open(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{verb} {path}: {error.read().decode()}") from None

    def fault(self, **fields):
        """Let something go wrong: once, unless `count` or `probability` says otherwise."""
        return self.control("POST", "faults", fields)

    def clear_faults(self):
        self.control("DELETE", "faults")

    def pending_faults(self):
        return self.control("GET", "faults")["faults"]

    def requests(self, since=0):
        """The server's own log of what it was asked, after the entry `since`."""
        return self.control("GET", f"requests?since={since}")["requests"]

    def mark(self):
        """The last entry of the log."""
        log = self.requests()
        return log[-1]["id"] if log else 0

    def token(self):
        """An access token, as `gcloud auth print-access-token` would print it."""
        with open(self.env["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"], encoding="ascii") as file:
            return file.read().strip()

    def close(self):
        """End the process and wait until it has gone."""
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"`ciranda sim` did not end within {STOP_DEADLINE} s") from None
        finally:
            self.process.stdout.close()
