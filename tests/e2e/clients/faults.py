"""What a client raises when something goes wrong, and whether all that can go wrong has made one
raise something.

`struck` has what has: at the end of the run that must be everything that the simulator names.
"""

import re

from google.api_core import exceptions

from checks import Unmet, check, equal, eventually

# What a client that is built on google-api-core raises for each canonical status.
API_CORE = {
    "CANCELLED": exceptions.Cancelled,
    "UNKNOWN": exceptions.InternalServerError,
    "INVALID_ARGUMENT": exceptions.BadRequest,
    "DEADLINE_EXCEEDED": exceptions.GatewayTimeout,
    "NOT_FOUND": exceptions.NotFound,
    "ALREADY_EXISTS": exceptions.Conflict,
    "PERMISSION_DENIED": exceptions.Forbidden,
    "UNAUTHENTICATED": exceptions.Unauthorized,
    "RESOURCE_EXHAUSTED": exceptions.TooManyRequests,
    "FAILED_PRECONDITION": exceptions.BadRequest,
    "ABORTED": exceptions.Conflict,
    "OUT_OF_RANGE": exceptions.BadRequest,
    "UNIMPLEMENTED": exceptions.MethodNotImplemented,
    "INTERNAL": exceptions.InternalServerError,
    "UNAVAILABLE": exceptions.ServiceUnavailable,
    "DATA_LOSS": exceptions.InternalServerError,
}

# The kinds of faults, the actions and the limits that a client has raised an exception for.
struck = set()

# Seconds: what a slow answer takes, what a client waits that is to give up before it comes (a client
# that the machine holds up for longer than the answer takes would find it there), and what one waits
# that is to have the answer, however busy the machine is.
SLOW = 60.0
PATIENCE = 0.5
PATIENT = 60.0


def expect(client, fault, expected, call, **options):
    """Let a fault strike `call`, which must raise `expected`; the fault must be used up then."""
    client.cloud.fault(**fault)
    error = client.raises(expected, call, **options)
    # A client that gives up may have done so before its request was read.
    eventually(
        f"the fault of the kind {fault['kind']} has struck",
        lambda: client.cloud.pending_faults() == [],
    )
    struck.add(fault["kind"])
    return error


def each_status(client, method, call, classes):
    """Every status as an error; `classes` has the exception of each."""
    for status, expected in classes.items():
        fault = {"kind": "error", "method": method, "status": status, "message": f"a {status}"}
        if status == "UNAUTHENTICATED":
            fault["count"] = 3  # Google's transports renew the token twice before they say so
        expect(client, fault, expected, call, text=f"a {status}")


def each_loss(client, method, call, reset, truncate, timeout):
    """Answers that are lost, cut, withheld or late. `call` gives up after `patience` seconds."""
    expect(client, {"kind": "reset", "method": method}, reset, call)
    expect(client, {"kind": "truncate", "method": method}, truncate, call)
    expect(client, {"kind": "hang", "method": method}, timeout, call, patience=PATIENCE)
    slow = {"kind": "slow", "method": method, "seconds": SLOW}
    expect(client, slow, timeout, call, patience=PATIENCE)


def late(client, method, call):
    """An answer that is late for nobody who has patience."""
    client.cloud.fault(kind="slow", method=method, seconds=0.2)
    check(call() is not None, "there is no answer")
    equal(client.cloud.pending_faults(), [], "faults that have not struck")


def _named(cloud, path, body):
    """What the simulator names when it is asked for something that there is not."""
    try:
        cloud.control("POST", path, body)
    except RuntimeError as error:
        names = re.search(r"there are ([\w, ]+)", str(error))
        check(names, f"the refusal does not name what there is: {error}")
        return set(names.group(1).split(", "))
    raise Unmet(f"the simulator takes {path} {body}")


def known(cloud):
    """All that the simulator can make go wrong."""
    kinds = _named(cloud, "faults", {"kind": "none that there is"})
    nodes = _named(cloud, "nodes/any:none", {})
    workers = _named(cloud, "nodes/any/workers/0:none", {})
    return kinds | nodes | workers | {"capacity", "quota limit"}
