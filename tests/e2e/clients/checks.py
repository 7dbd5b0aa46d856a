"""What a walk asserts, and what is counted of each client."""

import collections
import contextlib
import time

DEADLINE = 45


class Unmet(Exception):
    """Something about the simulated cloud is not what a client of the real one relies on."""


def check(condition, what):
    if not condition:
        raise Unmet(what)


def equal(actual, expected, what):
    if actual != expected:
        raise Unmet(f"{what}: {actual!r}, not {expected!r}")


def matches(pattern, text, what):
    if not pattern.search(text):
        raise Unmet(f"{what}: {text!r} does not match {pattern.pattern}")


def eventually(what, look, deadline=DEADLINE, every=0.05):
    """The first true value of `look()`; Unmet with the last one when there is none in time."""
    limit = time.monotonic() + deadline
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() > limit:
            raise Unmet(f"not within {deadline} s: {what} (last: {value!r})")
        time.sleep(every)


# Seconds that what is held takes at least: far more than a look at it in the meantime, on however busy
# a machine. Nobody waits for them: the simulator's clock is set on. All holds of a run together are far
# from the hour that a token lives.
HOLD = 30


@contextlib.contextmanager
def held(cloud, delay):
    """What begins in the block, and takes this delay, is not done before the end of the block."""
    cloud.control("PUT", "delays", {delay: HOLD * cloud.scale})
    try:
        yield
    finally:
        cloud.control("PUT", "delays", {delay: None})
        let_go(cloud)


def let_go(cloud):
    """What takes HOLD seconds has taken them."""
    cloud.control("POST", "clock", {"advance": HOLD})


def _http_status(error):
    """The status of the answer that an exception stands for; None when it stands for none."""
    answer = getattr(error, "resp", None) or getattr(error, "response", None)
    return getattr(answer, "status", None) or getattr(answer, "status_code", None)


class Client:
    """One client's part of the run: a name, the cloud, and what it has raised: exceptions by their
    labels, the modules that they are from, and how many of them stand for each HTTP status.

    Names of resources carry `tag`, so that a walk can be made again in the same simulator.
    """

    def __init__(self, name, cloud, tag, label=lambda error: type(error).__name__):
        self.name = name
        self.cloud = cloud
        self.tag = tag
        self.exceptions = {}
        self.modules = {}
        self.refused = collections.Counter()
        self._label = label

    def called(self, name):
        """A name for a resource of this walk."""
        return f"{name}-{self.tag}"

    def raises(self, expected, call, *arguments, text=None, **options):
        """Call, and return the exception: exactly of the class `expected`, or one of several, and
        with `text` in it.
        """
        classes = expected if isinstance(expected, tuple) else (expected,)
        wanted = " or ".join(each.__name__ for each in classes)
        try:
            value = call(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - the class is what is tested
            if type(error) not in classes:
                raise Unmet(f"expected {wanted}, got {type(error).__name__}: {error}") from error
            label = self._label(error)
            if text and text not in str(error):
                raise Unmet(f"{label} without {text!r}: {error}") from error
            self.exceptions[label] = self.exceptions.get(label, 0) + 1
            self.modules[label] = type(error).__module__
            status = _http_status(error)
            if status:
                self.refused[status] += 1
            return error
        raise Unmet(f"expected {wanted}, got the answer {value!r}")
