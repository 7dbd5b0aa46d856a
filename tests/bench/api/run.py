"""bench-api: listing queued resources, ciranda against google-api-python-client; the last line is JSON.

All are whole programs that print name and state of each, with the credentials and the endpoint that
`ciranda sim` prints: `ciranda qr list --format=value(...)`, which asks for these fields alone, and the
peer's usual loop (ratio_cpu); a Lua script's loop against it, both with whole messages
(ratio_cpu_whole); and `qr list` against the peer told to ask for the two fields (ratio_cpu_fields). What
is measured is the client's process alone (wait4); the server is another one. All must print the same.
"""

import concurrent.futures
import http.client
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from simulator import Simulator

BINARY = sys.argv[1]
SHORT = "CIRANDA_SHORT" in os.environ
COUNT = int(os.environ.get("BENCH_RESOURCES", 500 if SHORT else 10000))
ROUNDS = 1 if SHORT else 3
SETTLED = 120  # s, until the cloud has taken the last request into its queue
HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = {
    "ciranda": [BINARY, "qr", "list", "--format=value(name,state.state)"],
    "ciranda_whole": [BINARY, os.path.join(HERE, "whole.lua")],
    "peer": [sys.executable, os.path.join(HERE, "peer.py")],
    "peer_fields": [sys.executable, os.path.join(HERE, "peer.py"), "fields"],
}


def create(cloud, first, last):
    """Ask over one connection for queued resources that wait for a day far away."""
    connection = http.client.HTTPConnection(cloud.host, timeout=60)
    headers = {"Authorization": f"Bearer {cloud.token()}", "Content-Type": "application/json"}
    for number in range(first, last):
        name = f"qr-{number:05d}"
        node = {
            "acceleratorType": "v5litepod-16",
            "runtimeVersion": "v2-alpha-tpuv5-lite",
            "networkConfig": {"network": "default", "subnetwork": "default"},
            "labels": {"team": "research", "number": str(number)},
            "metadata": {"startup-script": "#!/bin/bash\necho started\n"},
        }
        spec = {"parent": cloud.parent, "nodeId": name, "node": node}
        policy = {"validAfterDuration": "8640000s"}
        body = json.dumps({"tpu": {"nodeSpec": [spec]}, "spot": {}, "queueingPolicy": policy})
        path = f"/v2/{cloud.parent}/queuedResources?queuedResourceId={name}"
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{name}: HTTP {answer.status}: {text[:500]!r}")
    connection.close()


def measure(command, environment):
    """Run a client; its CPU (s), its largest resident set (MB) and what it printed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"{command[:3]} ended with status {process.returncode}")
        output.seek(0)
        text = output.read()
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text


def compare(environment):
    """Run all programs in turn; the medians of CPU (s) and memory (MB), by program."""
    runs = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name, command in PROGRAMS.items():
            runs[name].append(measure(command, environment))
            lines = len(runs[name][-1][2].splitlines())
            if runs[name][-1][2] != runs["ciranda"][0][2] or lines != COUNT:
                raise RuntimeError(f"{name} has another list: {lines} lines of {COUNT}")
    return tuple(
        {name: statistics.median(run[place] for run in runs[name]) for name in PROGRAMS}
        for place in (0, 1)
    )


def main():
    with tempfile.TemporaryDirectory(prefix="ciranda-bench-api-") as home:
        cloud = Simulator(BINARY)
        try:
            threads = 4
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                bounds = [COUNT * n // threads for n in range(threads + 1)]
                list(pool.map(lambda pair: create(cloud, *pair), zip(bounds, bounds[1:])))
            environment = dict(os.environ, HOME=home, XDG_STATE_HOME=home, **cloud.env)
            limit = time.monotonic() + SETTLED
            while b"CREATING" in measure(PROGRAMS["ciranda"], environment)[2]:
                if time.monotonic() > limit:
                    raise RuntimeError(f"requests are still CREATING after {SETTLED} s")
                time.sleep(1)
            cpu, rss = compare(environment)
        finally:
            cloud.close()
    result = {"bench": "api", "resources": COUNT, "rounds": ROUNDS}
    for name in PROGRAMS:
        result[f"{name}_cpu_s"], result[f"{name}_rss_mb"] = round(cpu[name], 3), round(rss[name], 1)
    for key, ours, theirs in (
        ("", "ciranda", "peer"),
        ("_whole", "ciranda_whole", "peer"),
        ("_fields", "ciranda", "peer_fields"),
    ):
        result[f"ratio_cpu{key}"] = round(cpu[theirs] / cpu[ours], 2)
        result[f"ratio_rss{key}"] = round(rss[theirs] / rss[ours], 2)
    version = importlib.metadata.version("google-api-python-client")
    result["peer"] = f"google-api-python-client {version}, Python {sys.version.split()[0]}"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
