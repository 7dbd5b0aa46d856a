"""The run: every client's walk, what the server's log says of it, and the sabotages that must turn it red."""

import argparse
import collections
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import faults
from checks import Client, Unmet, check
from simulator import Simulator

# Seconds for all of it: some ten times what it takes on a quiet machine.
LIMIT = 900

# A minute of the cloud passes in a tenth of a second. Nobody has the v5p: requests for it wait.
SIMULATOR = ("--scale", "600", "--capacity", "v5p=0")

# What each client of an API has to show.
METHODS, EXCEPTIONS = 12, 5

PACKAGES = (
    "google-api-core",
    "google-api-python-client",
    "google-auth",
    "google-cloud-storage",
    "google-cloud-tpu",
    "paramiko",
    "protobuf",
    "requests",
    "websocket-client",
)

# A client: its name, its module, the walks that it makes with their arguments, and, of an API's
# client, the packages whose exceptions are its own.
Part = collections.namedtuple("Part", "name module walks packages", defaults=((),))

PARTS = (
    Part("google-cloud-tpu", "cloud_tpu", [("walk",), ("walk_faults",)], ("google.api_core",)),
    *(
        Part(
            f"google-api-python-client {version}",
            "api_client",
            [("walk", version), ("walk_failing_calls", version), ("walk_failing_queue", version)],
            ("googleapiclient",),
        )
        for version in ("v2", "v2alpha1")
    ),
    Part(
        "google-cloud-storage", "cloud_storage", [("walk",), ("walk_faults",)], ("google.api_core",)
    ),
    Part("google-auth", "auth", [("walk",)]),
    Part("google-api-python-client, other APIs", "other_apis", [("walk",)], ("googleapiclient",)),
    Part("curl", "curl", [("walk",)]),
    Part("paramiko", "ssh", [("walk",)]),
)

TYPE = "type.googleapis.com/google.cloud.tpu."

# A sabotage: the client that has to notice, the field of the answers to a method, its value there
# (none: it is missing), and what the client's walk says then.
Sabotage = collections.namedtuple("Sabotage", "part method field value text", defaults=(None,))

SABOTAGES = {
    "state-as-a-string": Sabotage(
        "google-cloud-tpu", "queuedResources.get", "state", {"value": "ACTIVE"}, "STATE_UNSPECIFIED"
    ),
    "state-as-a-string-in-json": Sabotage(
        "google-api-python-client v2",
        "queuedResources.get",
        "state",
        {"value": "ACTIVE"},
        "is no QueuedResourceState message",
    ),
    "int64-as-a-number": Sabotage(
        "google-api-python-client v2", "nodes.get", "id", {"value": 7}, "7 is no int64"
    ),
    "int64-of-storage-as-a-number": Sabotage(
        "google-cloud-storage", "storage.objects.insert", "size", {"value": 7}, "7 is no uint64"
    ),
    "wrong-type-of-metadata": Sabotage(
        "google-cloud-tpu",
        "operations.*",
        "metadata.@type",
        {"value": TYPE + "v9.OperationMetadata"},
        "ParseError",
    ),
    "wrong-type-of-response": Sabotage(
        "google-cloud-tpu",
        "operations.get",
        "response.@type",
        {"value": TYPE + "v2.AcceleratorType"},
        "ParseError",
    ),
    "wrong-type-in-json": Sabotage(
        "google-api-python-client v2alpha1",
        "operations.get",
        "metadata.@type",
        {"value": TYPE + "v2.OperationMetadata"},
        "does not know the @type",
    ),
    "no-next-page-token": Sabotage(
        "google-cloud-tpu", "queuedResources.list", "nextPageToken", {}, "what the pages hold"
    ),
    "no-next-page-token-in-json": Sabotage(
        "google-api-python-client v2",
        "queuedResources.list",
        "nextPageToken",
        {},
        "what the pages hold",
    ),
    "no-next-page-token-of-storage": Sabotage(
        "google-cloud-storage", "storage.objects.list", "nextPageToken", {}, "pages of four"
    ),
    "unknown-enum-value": Sabotage(
        "google-api-python-client v2", "nodes.get", "health", {"value": "FINE"}, "'FINE' is none of"
    ),
    "time-without-zone": Sabotage(
        "google-cloud-tpu",
        "nodes.get",
        "createTime",
        {"value": "2026-01-01T00:00:00"},
        "ParseError",
    ),
    "token-that-nobody-gave": Sabotage(
        "google-auth", "oauth.token", "access_token", {"value": "ya29.nobody-gave-this"}, "401"
    ),
}


class OutOfTime(BaseException):
    """The run has taken too long, or is to end; nothing that expects an exception may take it for one."""


def say(text):
    print(text, flush=True)


def set_environment(cloud, directory):
    """Nothing of the user's own accounts, settings or proxies; then what the simulator prints."""
    for name in list(os.environ):
        if re.match("GOOGLE_|GCE_|CLOUDSDK_|GCLOUD_", name) or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ.update(cloud.env)
    os.environ["HOME"] = os.environ["CLOUDSDK_CONFIG"] = directory


def make_walks(walks, part, client):
    """Make walks of a client; what does not hold is raised."""
    module = importlib.import_module(part.module)
    for name, *arguments in walks:
        getattr(module, name)(client, *arguments)


def new_client(part, cloud, tag):
    module = importlib.import_module(part.module)
    label = getattr(module, "label", None)
    return Client(part.name, cloud, tag, **({"label": label} if label else {}))


def account(part, client, log):
    """What the server's log says of a client's part in the run."""
    methods, answered, statuses, agents = {}, set(), collections.Counter(), set()
    for entry in log:
        if entry["path"].startswith("/sim/"):
            continue
        method = entry.get("method", "none")
        methods[method] = methods.get(method, 0) + 1
        statuses[entry["status"]] += 1
        agents.add(entry["client"])
        if entry["status"] < 400:
            answered.add(method)
    for status, count in client.refused.items():
        check(
            statuses[status] >= count,
            f"{count} exceptions for status {status}, of which the server sent {statuses[status]}",
        )
    if part.packages:
        check(len(answered) >= METHODS, f"only {len(answered)} methods: {sorted(answered)}")
        own = [
            label for label, module in client.modules.items() if module.startswith(part.packages)
        ]
        check(len(own) >= EXCEPTIONS, f"only {len(own)} classes of its own exceptions: {own}")
    return {
        "calls": sum(methods.values()),
        "methods": dict(sorted(methods.items())),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "exceptions": dict(sorted(client.exceptions.items())),
        "agents": sorted(agents),
    }


class Run:
    """The outcome of the run."""

    def __init__(self, cloud):
        self.cloud = cloud
        self.failures = []
        self.clients = {}
        self.sabotages = {}

    def attempt(self, title, work):
        """Do something that holds or not; what does not hold is shown and counted."""
        start = time.monotonic()
        try:
            result = work()
        except Exception:  # noqa: BLE001 - whatever it is, it is a failure
            self.failures.append(title)
            say(f"FAILED {title}\n{traceback.format_exc()}")
            self.cloud.clear_faults()
            return None
        say(f"ok     {title} ({time.monotonic() - start:.1f} s)")
        return result

    def walk(self, part):
        def work():
            before = self.cloud.mark()
            client = new_client(part, self.cloud, "walk")
            try:
                make_walks(part.walks, part, client)
            except Exception:
                say("the last of what the simulator was asked:")
                for entry in self.cloud.requests(before)[-8:]:
                    say(f"  {json.dumps(entry, ensure_ascii=False)}")
                raise
            check(self.cloud.pending_faults() == [], "a fault has not struck")
            return account(part, client, self.cloud.requests(before))

        self.clients[part.name] = self.attempt(part.name, work)

    def coverage(self):
        """Every kind of fault has made a client raise an exception."""
        missing = (
            faults.known(self.cloud) - {"alter"} - faults.struck
        )  # "alter" is for the sabotages
        check(not missing, f"no client has raised an exception for: {', '.join(sorted(missing))}")
        return sorted(faults.struck)

    def sabotage(self, name, tag):
        """A walk in which one field is altered: it has to fail, and because of that field."""
        plan = SABOTAGES[name]
        part = next(part for part in PARTS if part.name == plan.part)

        def work():
            self.cloud.fault(
                kind="alter", method=plan.method, field=plan.field, probability=1, **plan.value
            )
            try:
                make_walks(part.walks[:1], part, new_client(part, self.cloud, tag))
            except Exception as error:  # noqa: BLE001 - which one it is is checked
                told = f"{type(error).__name__}: {error}"
                check(plan.text in told, f"the walk failed otherwise: {told}")
                return told.partition("\n")[0][:160]
            finally:
                self.cloud.clear_faults()
            raise Unmet("the walk has not noticed")

        self.sabotages[name] = self.attempt(f"sabotage: {name}", work)


def versions():
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    found["python"] = platform.python_version()
    curl = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
    found["curl"] = re.match(r"curl (\S+)", curl).group(1)
    return found


def everything(cloud, chosen):
    """The whole run, or the clients that were chosen."""
    run = Run(cloud)
    for part in chosen:
        run.walk(part)
    struck = None
    if len(chosen) == len(PARTS) and not run.failures:
        struck = run.attempt("every fault has made a client raise", run.coverage)
    noticing = {part.name for part in chosen}
    for i, (name, plan) in enumerate(SABOTAGES.items()):
        if plan.part in noticing:
            run.sabotage(name, f"s{i}")
    return run, struck


def sabotaged(cloud, name):
    """The run of the client that has to notice, with the field altered: it fails."""
    run, plan = Run(cloud), SABOTAGES[name]
    cloud.fault(kind="alter", method=plan.method, field=plan.field, probability=1, **plan.value)
    run.walk(next(part for part in PARTS if part.name == plan.part))
    return run, None


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--only", default="", help="names of clients, with semicolons between them")
    parser.add_argument("--sabotage", choices=SABOTAGES)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = [part.name for part in PARTS]
    only = [name for name in options.only.split(";") if name]
    for name in only:
        if name not in names:
            parser.error(f"there is no client '{name}'; there are {', '.join(names)}")
    options.parts = [part for part in PARTS if not only or part.name in only]
    return options


def stop(*_):
    raise OutOfTime


def main():
    options = parse_arguments()
    if options.list:
        for part in PARTS:
            say(f"client    {part.name}")
        for name in SABOTAGES:
            say(f"sabotage  {name}")
        return 0
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, stop)
    signal.alarm(LIMIT)
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it tells what it also raises
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ciranda-clients-") as directory:
        cloud = Simulator(options.binary, *SIMULATOR)
        try:
            set_environment(cloud, directory)
            if options.sabotage:
                run, struck = sabotaged(cloud, options.sabotage)
            else:
                run, struck = everything(cloud, options.parts)
        finally:
            cloud.close()
    report = {
        "clients": run.clients,
        "faults": struck,
        "sabotages": run.sabotages,
        "versions": versions(),
        "seconds": round(time.monotonic() - start, 1),
        "failed": run.failures,
    }
    say(json.dumps(report, ensure_ascii=False))
    return 1 if run.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OutOfTime:
        sys.exit(f"e2e-clients: ended by a signal, or after {LIMIT} s")
