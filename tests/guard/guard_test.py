#!/usr/bin/env python3
"""What a guard promises besides the signal matrix: starting once, its death, disks, logs, environment, the record."""

import argparse
import ctypes
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

from harness import Attempt, Holder, Skip, Suite

NOBODY = 65534
PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19


def lines(count):
    """What `child chatter=COUNT` prints."""
    return b"".join(b"%020d %042d\n" % (i, 0) for i in range(count))


def case(function):
    """Give a case its attempt and clear up after it."""

    def run(suite):
        attempt = Attempt(suite)
        try:
            function(attempt)
        finally:
            attempt.clear()

    CASES.append((function.__doc__.splitlines()[0].rstrip("."), run))
    return function


CASES = []


@case
def environment(attempt):
    """Environment, working directory, shell, standard streams, umask, signals and descriptors of the command."""
    value = b"a b\n'\"$x\xff"
    script = (
        "import os, signal, sys, resource\n"
        "value = os.environb[b'CIR_TEST']\n"
        "os.write(1, repr([value, os.environ['HOME'], os.getcwd(), os.readlink('/proc/self/fd/0'), "
        "sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')), "
        "signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, "
        "os.umask(0), os.getsid(0) == os.getppid()]).encode())\n")
    with open(os.path.join(attempt.work, "look.py"), "w") as file:
        file.write(script)
    leak = os.open("/dev/null", os.O_RDONLY)
    attempt.stage("python3 look.py; exit $?", environment=b"CIR_TEST=" + value + b"\0HOME=/elsewhere\0")
    result = attempt.call("run", pass_fds=[leak], preexec_fn=lambda: (os.umask(0o027), signal.signal(
        signal.SIGHUP, signal.SIG_IGN), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])))
    os.close(leak)
    assert result.returncode == 0, result.stderr
    record = attempt.record()
    assert record["status"] == 0 and record["status_source"] == "leader", record
    want = [value, "/elsewhere", os.path.realpath(attempt.work), "/dev/null", ["0", "1", "2"], 4, set(), True, 0o027, True]
    got = eval(attempt.log())  # the test's own program wrote it
    assert got == want, (got, want)


@case
def home_relative(attempt):
    """A relative working directory is below the home directory, and the shell is the caller's."""
    os.makedirs(os.path.join(attempt.work, "run"))
    attempt.stage("pwd; echo $BASH_VERSION", cwd="run")
    os.unlink(attempt.path("shell"))
    attempt.call("run", env={"HOME": attempt.work, "SHELL": "/bin/bash"})
    assert attempt.record()["status"] == 0
    out = attempt.log().decode().splitlines()
    assert out[0] == os.path.join(attempt.work, "run") and out[1], out


@case
def closed_directory(attempt):
    """A working directory that may be entered and not listed will do; one that may not be entered is refused."""
    user = None if os.geteuid() else NOBODY
    for mode, done in ((0o600, 1), (0o100, 0)):
        other = Attempt(attempt.suite, user)
        closed = os.path.join(other.work, "closed")
        os.mkdir(closed)
        os.chmod(closed, mode)
        if user:
            os.chown(closed, user, user)
        other.stage("pwd; exit 3", cwd=closed)
        result = other.call("run")
        assert result.returncode == done, (oct(mode), result)
        if done:
            assert f"{closed}: Permission denied".encode() in result.stderr, result
            assert not os.path.exists(other.path("started"))
        else:
            assert other.record()["status"] == 3 and other.log().decode() == closed + "\n", other.log()
        os.chmod(closed, 0o700)


@case
def refusals(attempt):
    """What cannot be started is refused with a reason, and can be repaired."""
    def refused(what, **keywords):
        result = attempt.call("run", **keywords)
        assert result.returncode == 1 and what.encode() in result.stderr, (what, result)
        assert not os.path.exists(attempt.path("started")), what
        assert attempt.status()["state"] == "staged"
    refused("stage it first")
    attempt.stage("exit 4", cwd="/no/such/place")
    refused("/no/such/place")
    attempt.stage("exit 4", cwd="/etc/passwd")
    refused("Not a directory")
    attempt.stage("exit 4", cwd="below")
    refused("/no/home/below: No such file", env={"HOME": "/no/home"})
    attempt.stage("exit 4", environment=b"GOOD=1\0BAD\0")
    refused("byte 7")
    attempt.stage("exit 4", environment=b"GOOD=1\0", shell="/no/such/shell")
    refused("/no/such/shell")
    attempt.stage("exit 4\0")
    refused("NUL")
    assert attempt.call("run", "--grace", "x").returncode == 2
    assert attempt.call("run", "--grace", "-1").returncode == 2
    assert attempt.call("run", "--method", "guess").returncode == 2
    assert attempt.call("run", "--grace").returncode == 2
    assert attempt.call("walk").returncode == 2
    helped = attempt.call("run", "--help")
    assert helped.returncode == 0 and b"usage: " in helped.stdout, helped
    attempt.stage("exit 4")
    limited = attempt.call("run", restore_signals=True, preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)))
    assert limited.returncode == 1 and b"File too large" in limited.stderr, limited
    assert not os.path.exists(attempt.path("started"))
    assert b"not started" in attempt.call("follow").stderr or attempt.call("follow").returncode == 1
    attempt.run("exit 4")
    assert attempt.record()["status"] == 4


@case
def cannot_exec(attempt):
    """A command too long for the system is an error of `run`, with a record that invents no status."""
    attempt.stage("exit 0 #" + "x" * 200000)
    result = attempt.call("run")
    assert result.returncode == 1 and b"Argument list too long" in result.stderr, result
    record = attempt.record()
    assert record["leader"] is None and record["status"] is None and "too long" in record["error"], record


@case
def channel_closes(attempt):
    """`run` returns and its channel closes while the command goes on."""
    attempt.run(attempt.cmd(100, 17, "until=" + attempt.gate()))  # returns at the end of both streams
    attempt.open_gate()
    assert attempt.record()["status"] == 17


@case
def sixty_starts(attempt):
    """Sixty parallel starts run once, and all of them succeed."""
    attempt.stage("echo started >> count; until [ -e gate ]; do sleep 0.05; done; exit 3")
    runs = [attempt.start("run") for _ in range(60)]
    outputs = [run.communicate(timeout=60) for run in runs]
    assert all(run.returncode == 0 for run in runs), outputs
    states = [json.loads(out) for out, _ in outputs]
    assert {s["state"] for s in states} == {"running"} and len({s["pid"] for s in states}) == 1, states
    attempt.open_gate()
    assert attempt.record()["status"] == 3
    with open(os.path.join(attempt.work, "count")) as file:
        assert file.read() == "started\n"
    result = attempt.call("run")
    assert result.returncode == 0 and json.loads(result.stdout)["state"] == "exited"


def children(pid):
    """The processes whose parent this is."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) == pid:
                    found.append(int(name))
        except (OSError, ValueError):
            pass
    return found


def has_ended(pid):
    """Whether a process that is nobody's child here has ended, waited for or not."""
    try:
        return process_state(pid) in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def held(pid):
    """The paths of a process' descriptors."""
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            pass  # closed meanwhile
    return paths


@case
def killed_while_setting_up(attempt):
    """SIGKILL of `run` while it makes its files: the record says so, and no restart of the machine is made up."""
    attempt.stage("touch ran")
    os.mkfifo(attempt.path("exit.new"))  # `run` fills it up and does not get beyond it
    reading = os.open(attempt.path("exit.new"), os.O_RDONLY | os.O_NONBLOCK)
    size = fcntl.fcntl(reading, fcntl.F_GETPIPE_SZ)
    run = attempt.start("run")
    attempt.wait_for("a full pipe", lambda: fcntl.ioctl(reading, termios.FIONREAD, b"    ") == struct.pack("i", size))
    run.kill()
    run.communicate(timeout=60)
    os.close(reading)
    os.unlink(attempt.path("exit.new"))
    lost = attempt.status()
    assert lost["state"] == "lost" and not lost["rebooted"], lost
    assert attempt.call("adopt").returncode == 0
    record = attempt.record()
    assert record["error"] == "the guard was killed before it started the command", record
    assert record["leader"] is None and record["status"] is None, record
    assert not os.path.exists(os.path.join(attempt.work, "ran"))


@case
def killed_before_start(attempt):
    """SIGKILL of the guard, or of both, before it has started the command: the record says so, with no status."""
    for both in (False, True):
        other = Attempt(attempt.suite)
        other.stage("touch ran")
        os.mkfifo(other.path("pid.new"))  # the guard does not get beyond it
        run = other.start("run")
        chain = [run.pid]

        def forked():
            while len(chain) < 4 and children(chain[-1]):
                chain.extend(children(chain[-1]))
            return len(chain) >= 4
        other.wait_for("the leader", forked)
        for pid in chain[1:3] if both else chain[2:3]:
            os.kill(pid, signal.SIGKILL)
        _, message = run.communicate(timeout=60)
        assert run.returncode == 1 and (b"died while it started" if both else b"killed before") in message, message
        if both:
            assert other.call("adopt").returncode == 0
        record = other.record()
        assert record["leader"] is None and record["status"] is None, record
        assert record["error"] == "the guard was killed before it started the command", record
        assert other.alive() == [] and not os.path.exists(os.path.join(other.work, "ran"))


@case
def taken_away(attempt):
    """A directory that is removed as soon as the record is there: no guard stays behind."""
    attempt.run("until [ -e gate ]; do sleep 0.05; done")
    outer = attempt.status()["outer"]
    os.kill(outer, signal.SIGSTOP)
    attempt.wait_for("the outer guard to be stopped", lambda: process_state(outer) == "T")
    attempt.open_gate()
    attempt.record()
    attempt.wait_for("the inner guard's end", lambda: [process_state(p) for p in children(outer)] == ["Z"])
    shutil.rmtree(attempt.directory)
    os.kill(outer, signal.SIGCONT)
    deadline = time.monotonic() + 30
    while not has_ended(outer):
        assert time.monotonic() < deadline, "the outer guard goes on"
        time.sleep(0.01)


@case
def inner_killed(attempt):
    """SIGKILL of the inner guard: the outer one goes on, no byte and no status is lost."""
    attempt.run(attempt.cmd(200, 9, "chatter=100000", "until=" + attempt.gate()) + "; exit $?")
    attempt.wait_for("some output", lambda: len(attempt.log()) > 1000)
    before = attempt.status()
    os.kill(before["guard"], signal.SIGKILL)
    attempt.wait_for("the takeover", lambda: attempt.status()["guard"] == before["outer"])
    attempt.open_gate()
    record = attempt.record()
    assert record["status"] == 9 and record["leader"]["source"] == "wait" and record["takeovers"] == 1, record
    assert attempt.log() == lines(100000), "the log differs"
    assert record["log_bytes"] == 100000 * 64 and record["dropped_bytes"] == 0


@case
def inner_killed_in_stop(attempt):
    """SIGKILL of the inner guard after the TERM: no second TERM, and the stop goes on."""
    attempt.run(attempt.cmd(100, 11, "saved=" + attempt.gate()) + "; true", "--linger", "0.3")
    attempt.wait_ready()
    stop = attempt.start("stop", "--grace", "60")
    attempt.wait_for("the TERM", lambda: ["ready", "term"] in attempt.events().values())
    before = attempt.status()
    os.kill(before["guard"], signal.SIGKILL)
    attempt.wait_for("the takeover", lambda: attempt.status()["guard"] == before["outer"])
    attempt.open_gate()
    record = json.loads(stop.communicate(timeout=60)[0])
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    assert record["status"] == 11 and record["takeovers"] == 1, record


@case
def told_to_end_and_killed(attempt):
    """A SIGTERM of the outer guard is not lost with an inner one that is killed in the same moment."""
    attempt.run("exec " + attempt.cmd(100, 17), "--grace", "60")
    attempt.wait_ready()
    before = attempt.status()
    os.kill(before["outer"], signal.SIGSTOP)
    attempt.wait_for("the outer guard to be stopped", lambda: process_state(before["outer"]) == "T")
    os.kill(before["outer"], signal.SIGTERM)
    os.kill(before["guard"], signal.SIGKILL)
    attempt.wait_for("the inner guard's end", lambda: process_state(before["guard"]) == "Z")
    os.kill(before["outer"], signal.SIGCONT)
    record = attempt.record()
    assert record["stopped"] and record["reason"] == "the guard was told to end", record
    assert record["status"] == 17 and record["takeovers"] == 1, record


@case
def killed_while_announcing(attempt):
    """A leader's end that a guard was killed over is announced by its heir."""
    attempt.run("(" + attempt.cmd(100, 5, "until=" + attempt.gate()) + ") & until [ -e go ]; do sleep 0.05; done; exit 6")
    attempt.wait_ready()
    inner = attempt.status()["guard"]
    os.mkfifo(attempt.path("leader.new"))  # the guard does not get beyond it
    attempt.open_gate("go")
    attempt.wait_for("the leader's end", lambda: attempt.status()["leader"]["code"] == 6)
    time.sleep(0.2)  # nearly always it is there by now
    os.unlink(attempt.path("leader.new"))
    os.kill(inner, signal.SIGKILL)
    attempt.wait_for("the notice", lambda: os.path.exists(attempt.path("leader")))
    attempt.open_gate()
    record = attempt.record()
    assert record["status"] == 6 and record["takeovers"] == 1, record


@case
def stop_killed(attempt):
    """SIGKILL of `stop` once it has said that the guard knows: the attempt is stopped all the same."""
    attempt.run(attempt.cmd(100, 13, "saved=" + attempt.gate()) + "; true", "--linger", "0.2")
    attempt.wait_ready()
    stop = attempt.start("stop", "--grace", "60")
    assert stop.stderr.readline() == b"asked\n"
    stop.kill()
    stop.communicate(timeout=60)
    attempt.open_gate()
    record = attempt.record()
    assert record["stopped"] and record["status"] == 13, record


@case
def outer_killed(attempt):
    """SIGKILL of the outer guard alone changes nothing."""
    attempt.run(attempt.cmd(200, 12) + "; true")
    attempt.wait_ready()
    os.kill(attempt.status()["outer"], signal.SIGKILL)
    record, _ = attempt.stop("--grace", "20", "--linger", "0.2")
    assert record["status"] == 12 and record["takeovers"] == 0, record


def process_state(pid):
    """The letter by which the kernel says what the process' first thread does."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def kill_both(attempt):
    status = attempt.status()
    os.kill(status["outer"], signal.SIGKILL)
    os.kill(status["guard"], signal.SIGKILL)
    attempt.wait_for("the loss", lambda: attempt.status()["state"] == "lost")
    return status


@case
def both_killed(attempt):
    """SIGKILL of both guards: lost, then adopted; nothing of the log is lost, and the status is true or unknown."""
    attempt.run(attempt.cmd(200, 13, "chatter=20000") + "; true")
    attempt.wait_ready()
    pid = kill_both(attempt)["pid"]
    result = attempt.call("status")
    status = json.loads(result.stdout)
    assert result.returncode == 3 and len(status["processes"]) == 2 and not status["rebooted"], (result.returncode, status)
    assert attempt.call("follow", "--from", "0").returncode == 3
    again = attempt.call("run")
    assert again.returncode == 0 and json.loads(again.stdout)["state"] == "lost", again
    assert attempt.call("adopt").returncode == 0
    adopted = attempt.status()
    assert adopted["state"] == "running" and adopted["adopted"] and adopted["pid"] == pid, adopted
    attempt.wait_for("the log", lambda: len(attempt.log()) == 20000 * 64)
    record, _ = attempt.stop("--grace", "20", "--linger", "0.2")
    assert attempt.log() == lines(20000), "the log differs"
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    target = [t for t in record["targets"] if t["wave"] == 1]
    assert len(target) == 1 and target[0]["code"] in (13, None), record
    assert record["status"] == (13 if target[0]["code"] == 13 else record["leader"]["code"]), record
    assert attempt.alive() == []


@case
def cannot_adopt(attempt):
    """What keeps a guard from taking over is said, and that the command goes on."""
    attempt.run(attempt.cmd(200, 19))
    attempt.wait_ready()
    kill_both(attempt)
    os.unlink(attempt.path("exit.new"))
    os.mkdir(attempt.path("exit.new"))
    result = attempt.call("adopt")
    assert result.returncode == 1 and b"Is a directory; what runs goes on" in result.stderr, result
    os.rmdir(attempt.path("exit.new"))
    record, _ = attempt.stop("--grace", "20")
    assert record["adopted"] and list(attempt.events().values()) == [["ready", "term", "saved"]], record


@case
def both_killed_in_stop(attempt):
    """SIGKILL of both guards after the TERM: `stop` adopts, and sends no second TERM."""
    attempt.run(attempt.cmd(100, 14, "saved=" + attempt.gate()) + "; true", "--linger", "0.2")
    attempt.wait_ready()
    first = attempt.start("stop", "--grace", "60")
    attempt.wait_for("the TERM", lambda: ["ready", "term"] in attempt.events().values())
    kill_both(attempt)
    _, message = first.communicate(timeout=60)
    assert first.returncode == 1 and b"has lost its guard" in message, message
    second = attempt.start("stop", "--grace", "60")
    attempt.wait_for("the adoption", lambda: attempt.status()["state"] == "stopping")
    assert attempt.status()["adopted"]
    attempt.open_gate()
    record = json.loads(second.communicate(timeout=60)[0])
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    assert record["adopted"] and record["status"] in (14, 0, 143), record
    assert attempt.alive() == []


@case
def both_killed_and_over(attempt):
    """SIGKILL of both guards and of the command: adopting writes a record, with no invented status."""
    attempt.run("exec " + attempt.cmd(200, 15))
    attempt.wait_ready()
    os.kill(kill_both(attempt)["pid"], signal.SIGKILL)
    attempt.wait_for("the end", lambda: attempt.alive() == [])
    attempt.call("adopt")
    record = attempt.record()
    known = record["leader"]["source"] == "pidfd"
    assert record["adopted"] and record["leader"]["signal"] == (9 if known else None), record
    assert record["status"] == (137 if known else None), record
    assert record["status_source"] == ("leader" if known else "unknown"), record


@case
def adopted_without_environment(attempt):
    """A process that was adopted is known when its environment can no longer be read, as in exec and in exit."""
    attempt.run(attempt.cmd(100, 18, "forget=" + attempt.gate("forget")) + " & exit 0")
    attempt.wait_ready()
    attempt.wait_for("the leader's end", lambda: attempt.status()["leader"]["code"] == 0)
    kill_both(attempt)
    assert attempt.call("adopt").returncode == 0

    def remembered():
        with open(attempt.path("state"), "rb") as file:
            return struct.unpack("6I", file.read(24))[4]
    attempt.wait_for("the guard to have seen it", lambda: remembered() == 2)
    attempt.open_gate("forget")
    attempt.wait_for("the environment to be gone", lambda: attempt.alive() == [])
    assert attempt.status()["processes"] == list(attempt.events()), attempt.status()
    record, _ = attempt.stop("--grace", "60", "--linger", "0.1")
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    assert [t["pid"] for t in record["targets"]] == list(attempt.events()) and record["adopted"], record


@case
def looked_at_while_adopted(attempt):
    """Adopting waits for who only looks: a shared lock is no guard."""
    attempt.run(attempt.cmd(200, 0))
    attempt.wait_ready()
    kill_both(attempt)
    directory = os.open(attempt.directory, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_SH)
    adopting = attempt.start("adopt")
    try:
        adopting.wait(0.5)
    except subprocess.TimeoutExpired:
        pass
    os.close(directory)
    assert adopting.communicate(timeout=60) == (b"", b"") and adopting.returncode == 0
    assert attempt.status()["state"] == "running"


@case
def ended_while_adopted(attempt):
    """Who comes to adopt what another one has adopted and seen end meanwhile finds it ended, not lost."""
    attempt.run(attempt.cmd(200, 0))
    attempt.wait_ready()
    kill_both(attempt)
    directory = os.open(attempt.directory, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_SH)
    adopting = attempt.start("adopt")
    attempt.wait_for("it to wait for the lock", lambda: os.path.realpath(attempt.directory) in held(adopting.pid))
    os.rename(attempt.path("exit.new"), attempt.path("exit"))
    os.unlink(attempt.path("state"))
    os.close(directory)
    assert adopting.communicate(timeout=60) == (b"", b"") and adopting.returncode == 0, adopting.returncode


@case
def pids_used_again(attempt):
    """A guard's pid that names another process by now: nothing below that is taken for the attempt's."""
    attempt.run(attempt.cmd(200, 0))
    attempt.wait_ready()
    status = kill_both(attempt)
    bystander = subprocess.Popen(["sleep", "60"])
    with open(attempt.path("state"), "r+b") as file:
        file.seek(24)  # behind six counters
        assert struct.unpack("ii", file.read(8)) == (status["guard"], status["outer"])
        file.seek(24)
        file.write(struct.pack("ii", os.getpid(), os.getpid()))
    lost = attempt.status()
    bystander.kill()
    bystander.wait()
    assert lost["state"] == "lost" and lost["guard"] == 0 and lost["outer"] == 0, lost
    assert status["pid"] in lost["processes"] and bystander.pid not in lost["processes"], lost


@case
def descriptors(attempt):
    """The guards hold neither the working nor the home directory open."""
    home = os.path.join(attempt.work, "home")
    os.makedirs(home)
    attempt.stage(attempt.cmd(200, 0))
    assert attempt.call("run", env={"HOME": home}).returncode == 0
    attempt.wait_ready()
    status = attempt.status()
    for pid in (status["guard"], status["outer"]):
        assert os.path.realpath(attempt.directory) in held(pid), held(pid)
        # The outer one may not have come to close what it has no use for before the command was ready.
        attempt.wait_for("nothing else to be held", lambda p=pid: not any(
            path.startswith(os.path.realpath(attempt.work)) for path in held(p)))


@case
def deep_directory(attempt):
    """A path that is too long to mark processes with is refused, before anything is started."""
    at = os.open(attempt.work, os.O_RDONLY)
    for _ in range(22):
        os.mkdir("d" * 200, dir_fd=at)
        above, at = at, os.open("d" * 200, os.O_RDONLY, dir_fd=at)
        os.close(above)
    with open("command", "wb", opener=lambda path, flags: os.open(path, flags, 0o600, dir_fd=at)) as file:
        file.write(b"exit 0")
    result = subprocess.run([attempt.suite.guard, "run", "."], capture_output=True, timeout=60,
                            preexec_fn=lambda: os.fchdir(at))
    assert result.returncode == 1 and b"cannot tell the path of ." in result.stderr, result
    assert os.listdir(at) == ["command"], os.listdir(at)
    os.close(at)


@case
def rebooted(attempt):
    """Another boot id and no record: lost, and nothing is adopted or signalled."""
    boot = os.path.join(attempt.work, "boot_id")
    with open(boot, "w") as file:
        file.write("boot-one\n")
    attempt.run("exec " + attempt.cmd(200, 0), "--boot-id-file", boot)
    attempt.wait_ready()
    assert attempt.status("--boot-id-file", boot)["boot_id"] == "boot-one"
    kill_both(attempt)
    with open(boot, "w") as file:
        file.write("boot-two\n")
    for subcommand in ("status", "adopt", "stop"):
        result = attempt.call(subcommand, "--boot-id-file", boot)
        status = json.loads(result.stdout)
        assert result.returncode == 3 and status["state"] == "lost" and status["rebooted"], (subcommand, result)
    assert list(attempt.events().values()) == [["ready"]]


@case
def no_state(attempt):
    """Started, and neither a guard nor its state is there: lost, and no restart of the machine is made up."""
    attempt.stage("touch ran")
    os.mkdir(attempt.path("started"))
    for subcommand in ("status", "adopt", "stop"):
        result = attempt.call(subcommand)
        status = json.loads(result.stdout)
        assert result.returncode == 3 and status["state"] == "lost" and not status["rebooted"], (subcommand, result)
        assert subcommand == "status" or b"no state that this build knows" in result.stderr, (subcommand, result)
    os.rmdir(attempt.path("started"))


@case
def stop_before_start(attempt):
    """A stop before the start: the attempt has ended, and a late start does nothing."""
    attempt.stage("touch ran")
    record, _ = attempt.stop("--reason", "changed my mind")
    assert record["status"] is None and record["reason"] == "changed my mind" and record["leader"] is None, record
    result = attempt.call("run")
    assert result.returncode == 0 and json.loads(result.stdout)["state"] == "exited", result
    assert not os.path.exists(os.path.join(attempt.work, "ran"))


@case
def stop_while_starting(attempt):
    """A stop, or two of them, at the same time as the start: each succeeds, and the attempt ends."""
    for delay in range(20):
        other = Attempt(attempt.suite)
        other.stage("sleep 60")
        stops = [other.start("stop", "--grace", "60", "--linger", "0") for _ in range(1 + delay % 2)]
        time.sleep(delay % 7 / 1000)
        run = other.start("run")
        for process in [run, *stops]:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, (delay, process.args[1], out, err)
        record = other.record()
        assert record["stopped"] and record["killed"] == 0, record


@case
def another_build(attempt):
    """A guard whose state another build cannot read: said so, soon, and the command is left alone."""
    attempt.run("exec " + attempt.cmd(200, 16))
    attempt.wait_ready()
    with open(attempt.path("state"), "r+b") as file:
        magic = file.read(4)
        file.seek(0)
        file.write(struct.pack("I", 0x43524701))
        file.flush()
        begin = time.monotonic()
        assert attempt.status()["state"] == "running"
        result = attempt.call("stop")
        assert result.returncode == 1 and b"another build" in result.stderr, result
        assert attempt.call("signal", "USR1").returncode == 1
        assert time.monotonic() - begin < 60 and list(attempt.events().values()) == [["ready"]]
        file.seek(0)
        file.write(magic)
    assert attempt.stop("--grace", "10")[0]["status"] == 16


@case
def being_made(attempt):
    """A guard whose state is still being made, on a slow disk, is waited for: it is of no other build."""
    for made in (b"", bytes(4096)):
        other = Attempt(attempt.suite)
        directory = os.open(other.directory, os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_EX)
        os.mkdir(other.path("started"))
        with open(other.path("state"), "wb") as file:
            file.write(made)
        stop = other.start("stop")
        try:
            stop.wait(3)
        except subprocess.TimeoutExpired:
            pass
        with open(other.path("exit.new"), "w") as file:
            file.write("{}\n")
        os.rename(other.path("exit.new"), other.path("exit"))
        os.close(directory)
        assert stop.communicate(timeout=60) == (b"{}\n", b"") and stop.returncode == 0, stop.returncode


@case
def ignorer(attempt):
    """A program that ignores TERM is killed at the end of the grace, not before and not much later."""
    attempt.run(attempt.cmd(200, 0, "ignore") + "; true")
    attempt.wait_ready()
    record, took = attempt.stop("--grace", "1", "--reason", "a \"reason\"\n\xe9")
    target = next(t for t in record["targets"] if t["wave"] == 1)
    # How long the record takes to be on the disk is another matter.
    assert 1.0 <= took and target["ended_at"] - target["signalled_at"] < 10, (took, record)
    assert record["status"] == 137 and record["killed"] >= 2, record
    assert record["reason"].startswith('a "reason"'), record
    assert attempt.alive() == []


@case
def shorter_grace(attempt):
    """A second stop can shorten the grace, never lengthen it; neither sends a second TERM."""
    attempt.run("exec " + attempt.cmd(100, 0, "saved=" + attempt.gate()))
    attempt.wait_ready()
    first = attempt.start("stop", "--grace", "60")
    attempt.wait_for("the TERM", lambda: ["ready", "term"] in attempt.events().values())
    record, _ = attempt.stop("--grace", "0.5")
    assert record["status"] == 137, record
    assert json.loads(first.communicate(timeout=60)[0]) == record and first.returncode == 0
    assert list(attempt.events().values()) == [["ready", "term"]]
    again, _ = attempt.stop()
    assert again == record


@case
def not_permitted(attempt):
    """A program of another user: the record says that the signal was not delivered, and why."""
    if os.geteuid() != 0:
        raise Skip("a program of another user is needed: run as root")
    child = os.path.join(attempt.work, "cir-root-child")
    subprocess.run(["cp", attempt.suite.child, child], check=True)
    os.chmod(child, 0o4755)
    attempt.user = NOBODY
    os.chown(attempt.directory, NOBODY, NOBODY)
    open(attempt.journal, "w").close()
    os.chmod(attempt.journal, 0o666)
    attempt.run(attempt.cmd(200, 21, "root", "until=" + attempt.gate(), child=child) + "; exit $?")
    attempt.wait_ready()
    begin = time.monotonic()
    stop = attempt.start("stop", "--grace", "1")
    attempt.wait_for("the end of the grace", lambda: time.monotonic() - begin > 1.5 and attempt.status()["targets"])
    assert stop.poll() is None
    attempt.open_gate()
    record = json.loads(stop.communicate(timeout=60)[0])
    target = [t for t in record["targets"] if t["wave"] == 1]
    assert len(target) == 1 and target[0]["delivery"] == "not delivered: EPERM" and not target[0]["signalled"], record
    assert target[0]["code"] in (21, None), record
    assert list(attempt.events().values()) == [["ready", "end"]], attempt.events()


@case
def not_seen(attempt):
    """A program that has ended, for which its parent does not wait and whose status may not be read: not taken for 0."""
    command, drop = attempt.cmd(100, 29), None
    if os.geteuid() == 0:  # in a container even root may not look at another user's process
        libc = ctypes.CDLL(None)
        command = "setpriv --reuid=nobody --regid=nogroup --clear-groups " + command
        open(attempt.journal, "w").close()
        os.chmod(attempt.journal, 0o666)

        def drop():
            libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)
    attempt.stage(command + " & exec sleep 300")
    result = attempt.call("run", preexec_fn=drop)
    assert result.returncode == 0, result
    attempt.wait_ready()
    record, _ = attempt.stop("--grace", "60", "--linger", "0.3")
    target = record["targets"][0]
    assert target["pid"] == next(iter(attempt.events())) and target["code"] == 29 == record["status"], record


@case
def unprivileged(attempt):
    """As an ordinary user: started, stopped, and the files are that user's own."""
    attempt.user = NOBODY if os.geteuid() == 0 else None
    if attempt.user:
        for path in (attempt.directory, attempt.work):
            os.chown(path, NOBODY, NOBODY)
    attempt.run(attempt.cmd(200, 22) + "; true")
    attempt.wait_ready()
    record, _ = attempt.stop("--grace", "20", "--linger", "0.2")
    assert record["status"] == 22, record
    assert {os.stat(attempt.path(n)).st_uid for n in os.listdir(attempt.directory) if n in ("log", "exit", "pid")} == {
        NOBODY if os.geteuid() == 0 else os.geteuid()}
    assert os.stat(attempt.path("log")).st_mode & 0o077 == 0


@case
def follow_reconnects(attempt):
    """Following from an offset over many lost connections gives identical bytes."""
    count = 30000
    attempt.run(attempt.cmd(200, 0, f"chatter={count}", "for=1"))
    got, cuts = b"", 0
    draw = random.Random(attempt.nonce)
    while len(got) < count * 64 - 50000:  # no connection lasts for longer than half of that
        follow = attempt.start("follow", "--from", len(got))
        part, most = b"", draw.randint(1, 50000)
        while len(part) < most:
            data = os.read(follow.stdout.fileno(), most - len(part))
            assert data, f"following ended by itself: {follow.communicate()}"
            part += data
        got += part
        cuts += 1
        follow.kill()
        follow.communicate()
    assert cuts >= 20, f"only {cuts} connections were cut"
    rest = attempt.call("follow", "--from", len(got))
    assert rest.returncode == 0 and got + rest.stdout == lines(count) == attempt.log(), "the bytes differ"
    beyond = attempt.call("follow", "--from", count * 64 + 1)
    assert beyond.returncode == 0 and beyond.stdout == b"", beyond


@case
def follow_ends(attempt):
    """Following ends: with the attempt, when idle for as long as asked, and when nobody reads any more."""
    attempt.run("echo one; until [ -e gate ]; do sleep 0.05; done; echo two")
    attempt.wait_for("the first line", lambda: attempt.log() == b"one\n")
    result = attempt.call("follow", "--from", 0, "--idle-exit", "0.4")
    assert result.returncode == 4 and result.stdout == b"one\n", result
    reader = attempt.start("follow", stderr=subprocess.DEVNULL)
    assert os.read(reader.stdout.fileno(), 100) == b"one\n"
    reader.stdout.close()
    assert reader.wait(60) == 1
    attempt.open_gate()
    result = attempt.call("follow", "--from", 2)
    assert result.returncode == 0 and result.stdout == b"e\ntwo\n", result


@case
def follow_waits_only(attempt):
    """Following from beyond the log's end copies nothing until there is such a byte, and tells the end."""
    attempt.run("echo one; until [ -e gate ]; do sleep 0.05; done; echo two; exit 4")
    attempt.wait_for("the first line", lambda: attempt.log() == b"one\n")
    for beyond in (5, 8e15):
        result = attempt.call("follow", "--from", beyond, "--idle-exit", "0.3")
        assert result.returncode == 4 and result.stdout == b"", result
    waiting = attempt.start("follow", "--from", 5)
    attempt.open_gate()
    assert waiting.communicate(timeout=60) == (b"wo\n", b"") and waiting.returncode == 0
    result = attempt.call("follow", "--from", 8e15)
    assert result.returncode == 0 and result.stdout == b"", result
    assert attempt.record()["status"] == 4


@case
def follow_leader(attempt):
    """Following with --leader-only ends with the leader, with all that it wrote, while its tree goes on."""
    attempt.run("(sleep 300; echo late) & seq 20000; exit 6")
    result = attempt.call("follow", "--leader-only", 1)
    assert result.returncode == 0 and result.stdout == b"".join(b"%d\n" % i for i in range(1, 20001)), result.stderr
    status = attempt.status()
    assert status["state"] == "running" and status["leader"]["code"] == 6 and len(status["processes"]) >= 1, status
    record, _ = attempt.stop("--grace", "5", "--linger", "0.1")
    assert record["leader"]["code"] == 6 and attempt.alive() == [], record


@case
def log_kept(attempt):
    """With --keep the log's oldest bytes are given back to the disk; offsets go on, and what is gone is never zeros."""
    count, keep = 60000, 400000
    attempt.run(attempt.cmd(100, 8, f"chatter={count}", "for=1"), "--keep", keep)
    live = attempt.call("follow", "--from", count * 64 - 640)
    record = attempt.record()
    assert live.stdout == lines(count)[-640:], (live.returncode, live.stdout[:100], live.stderr)
    first = record["log_first"]
    assert record["status"] == 8 and record["log_bytes"] == count * 64 and record["dropped_bytes"] == 0, record
    assert keep <= record["log_bytes"] - first <= 2 * keep + 65536, record
    stat = os.stat(attempt.path("log"))
    assert stat.st_size == count * 64, stat
    if stat.st_blocks * 512 >= stat.st_size:
        raise Skip("this file system cannot give back a part of a file")
    assert stat.st_blocks * 512 <= 2 * keep + 131072, stat
    rest = attempt.call("follow", "--from", first)
    assert rest.returncode == 0 and rest.stdout == lines(count)[first:], (rest.returncode, rest.stderr)
    for gone in (0, first - 1):
        result = attempt.call("follow", "--from", gone)
        assert result.returncode == 1 and result.stdout == b"" and str(first).encode() in result.stderr, result


def keep_through_takeover(attempt):
    attempt.run(attempt.cmd(100, 8, "chatter=40000", "until=" + attempt.gate()) + "; seq 200000; exit 8", "--keep", 100000)
    attempt.wait_for("some output", lambda: len(attempt.log()) > 300000)
    os.kill(attempt.status()["guard"], signal.SIGKILL)
    attempt.open_gate()
    record = attempt.record()
    whole = lines(40000) + b"".join(b"%d\n" % i for i in range(1, 200001))
    first = record["log_first"]
    assert record["log_bytes"] == len(whole) and record["takeovers"] == 1 and first > 1000000, record
    rest = attempt.call("follow", "--from", first)
    assert rest.returncode == 0 and rest.stdout == whole[first:], (rest.returncode, rest.stderr)


@case
def log_kept_through_takeover(attempt):
    """A guard that takes over goes on giving back what an earlier one kept."""
    keep_through_takeover(attempt)


@case
def log_lost_while_rewritten(attempt):
    """A guard that was killed while it wrote the log's last words again: its heir counts on, and shows no zeros."""
    attempt.run("seq 1000; until [ -e gate ]; do sleep 0.05; done; seq 2000; exit 9")
    before = b"".join(b"%d\n" % i for i in range(1, 1001))
    attempt.wait_for("the first words", lambda: attempt.log() == before)
    attempt.wait_for("their count", lambda: attempt.status()["log_bytes"] == len(before))
    status = attempt.status()
    os.kill(status["guard"], signal.SIGSTOP)
    attempt.wait_for("the guard to be stopped", lambda: process_state(status["guard"]) == "T")
    os.truncate(attempt.path("log"), 0)
    os.kill(status["guard"], signal.SIGKILL)
    attempt.wait_for("the takeover", lambda: attempt.status()["guard"] == status["outer"])
    attempt.open_gate()
    record = attempt.record()
    after = b"".join(b"%d\n" % i for i in range(1, 2001))
    assert record["log_first"] == len(before) and record["log_bytes"] == len(before + after), record
    assert attempt.call("follow", "--from", len(before)).stdout == after
    assert attempt.call("follow", "--from", "0").returncode == 1


@case
def follow_nonblocking(attempt):
    """Following waits where somebody who shares its standard output has made that nonblocking."""
    count = 20000
    attempt.run(attempt.cmd(200, 0, f"chatter={count}", "for=1"))
    attempt.record()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    follow = attempt.start("follow", stdout=writing)
    os.close(writing)
    attempt.wait_for("a full pipe", lambda: fcntl.ioctl(reading, termios.FIONREAD, b"    ") == struct.pack("i", size))
    with open(reading, "rb") as pipe:
        got = pipe.read()
    _, message = follow.communicate(timeout=60)
    assert follow.returncode == 0, message
    assert got == lines(count)


@case
def leader_announced(attempt):
    """The leader's end is announced while its tree goes on; the attempt ends with the tree."""
    attempt.run("(" + attempt.cmd(100, 5, "until=" + attempt.gate()) + ") & exit 6")
    attempt.wait_for("the notice", lambda: os.path.exists(attempt.path("leader")))
    with open(attempt.path("leader")) as file:
        leader = json.load(file)
    assert leader["code"] == 6 and not os.path.exists(attempt.path("exit")), leader
    attempt.wait_ready()
    assert attempt.status()["processes"] == list(attempt.events())
    between = int(time.time() * 1000) / 1000  # as fine as the record
    attempt.open_gate()
    record = attempt.record()
    assert record["status"] == 6 and record["leader"] == leader, record
    assert leader["ended_at"] <= between <= record["ended_at"], (leader, between, record)


@case
def signals(attempt):
    """Another signal reaches whom a stop would be for, and only them; TERM is refused."""
    attempt.run(attempt.cmd(200, 0) + " workers; true")
    attempt.wait_ready()
    reply = json.loads(attempt.call("signal", "USR1").stdout)
    attempt.wait_for("the signal", lambda: any("usr1" in e for e in attempt.events().values()))
    assert [t["delivery"] for t in reply["targets"]] == ["delivered"] and reply["signal"] == signal.SIGUSR1, reply
    assert reply["targets"][0]["pid"] == next(iter(attempt.events())), reply
    assert attempt.call("signal", "TERM").returncode == 2
    assert attempt.call("signal", "SIGNONSENSE").returncode == 2
    assert attempt.call("signal", "9nonsense").returncode == 2
    assert attempt.call("signal").returncode == 2
    assert json.loads(attempt.call("signal", "sigkill").stdout)["signal"] == 9
    attempt.wait_for("the death", lambda: attempt.status()["leader"] is None or len(attempt.status()["processes"]) < 4)
    record, _ = attempt.stop("--grace", "5", "--linger", "0.1")
    assert record["stopped"], record
    assert attempt.call("signal", "USR1").returncode == 1


@case
def heartbeat(attempt):
    """The guard shows that it lives, how long the log has been quiet, and which processes there are; then it clears up."""
    gates = [attempt.directory + suffix for suffix in (".go", ".end", ".end too")]
    for gate in gates:
        os.mkfifo(gate)
        os.chmod(gate, 0o666)
    attempt.run("echo a; cat '%s'; echo b; cat '%s' & cat '%s'; exit 3" % tuple(gates))
    attempt.wait_for("the first sign of life", lambda: os.path.exists(attempt.path("alive")))
    os.utime(attempt.path("alive"), (0, 0))
    attempt.wait_for("a quiet log", lambda: attempt.status()["log_idle"] > 0.4)
    opened = time.monotonic()
    open(gates[0], "w").close()
    attempt.wait_for("the log to grow", lambda: attempt.status()["log_idle"] < time.monotonic() - opened)
    attempt.wait_for("three processes", lambda: len(attempt.alive()) == 3 == len(attempt.status()["processes"]))
    attempt.wait_for("the same ones", lambda: sorted(attempt.status()["processes"]) == sorted(attempt.alive()))
    attempt.wait_for("a sign of life", lambda: os.stat(attempt.path("alive")).st_mtime > 0)
    for gate in gates[1:]:
        open(gate, "w").close()
    assert attempt.record()["status"] == 3
    kept = {"command", "cwd", "shell", "started", "pid", "log", "exit", "leader"}
    attempt.wait_for("the guard to clear up", lambda: set(os.listdir(attempt.directory)) <= kept)


@case
def lock_file(attempt):
    """The accelerator's lock file is removed when nobody holds it or the device, and only then."""
    lock, device = os.path.join(attempt.work, "lockfile"), os.path.join(attempt.work, "accel0")
    options = ["--lock", lock, "--devices", os.path.join(attempt.work, "accel")]
    os.mknod(device)  # not opened: what is forked for another case in that moment would hold it

    def once(name):
        other = Attempt(attempt.suite)
        other.run("test -e " + lock + " && echo there; true", *options)
        other.record()
        return other.log()
    open(lock, "w").close()
    with Holder(device):
        assert once("held device") == b"there\n" and os.path.exists(lock)
    with Holder(lock, True):
        assert once("held lock") == b"there\n" and os.path.exists(lock)
    assert once("stale before the start") == b"" and not os.path.exists(lock)
    attempt.run(f"touch {lock}; exec " + attempt.cmd(100, 0, "ignore", "device=" + device), *options)
    attempt.wait_ready()
    attempt.stop("--grace", "0.2")
    assert not os.path.exists(lock)


@case
def outside_holder(attempt):
    """A holder of the device outside the tree is reported, not signalled."""
    device = os.path.join(attempt.work, "accel0")
    os.mknod(device)  # not opened: what is forked for another case in that moment would hold it
    with Holder(device) as other:
        attempt.run(attempt.cmd(100, 4) + "; true", "--devices", os.path.join(attempt.work, "accel"))
        attempt.wait_ready()
        record, _ = attempt.stop("--grace", "10", "--linger", "0.1")
        assert record["outside_holders"] == [other.pid] and record["status"] == 4, record
        assert other.poll() is None


@case
def many_processes(attempt):
    """A tree of 300 processes is stopped and reported; the program's save is not disturbed."""
    attempt.run("for i in $(seq 300); do sleep 100 & done; " + attempt.cmd(300, 23) + "; wait")
    attempt.wait_ready()
    record, _ = attempt.stop("--grace", "40", "--linger", "0.3")
    assert record["status"] == 23 and record["killed"] == 0, (record["killed"], record["status"])
    assert len(record["targets"]) + record["targets_omitted"] >= 301, len(record["targets"])
    assert list(attempt.events().values()) == [["ready", "term", "saved"]]
    assert attempt.alive() == []


@case
def few_descriptors(attempt):
    """A tree of more processes than the guard may have descriptors is stopped, and what is left of it is killed."""
    attempt.stage("for i in $(seq 100); do (trap '' TERM; exec sleep 100) & done; " + attempt.cmd(100, 33) + "; wait")
    limited = attempt.call("run", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)))
    assert limited.returncode == 0, limited
    attempt.wait_ready()
    attempt.wait_for("all of them", lambda: sum("/sleep" in end[0] for end in attempt.ends()) == 100)
    stop = attempt.start("stop", "--grace", "60", "--linger", "0.1")
    attempt.wait_for("the second wave and the shell's end", lambda: attempt.status()["leader"]["signal"] == signal.SIGTERM)
    attempt.stop("--grace", "0")
    record = json.loads(stop.communicate(timeout=60)[0])
    assert record["status"] == 33 and record["killed"] == 100, (record["status"], record["killed"])
    assert list(attempt.events().values()) == [["ready", "term", "saved"]] and attempt.alive() == []


@case
def many_threads(attempt):
    """A traced program with threads saves and is reported, as is one that is stopped and continued meanwhile."""
    attempt.run(attempt.cmd(100, 24, "threads", "saved=" + attempt.gate()) + "; true", "--method", "ptrace", "--linger", "0.2")
    attempt.wait_ready()
    child = next(iter(attempt.events()))
    stop = attempt.start("stop", "--grace", "60")
    attempt.wait_for("the TERM", lambda: ["ready", "term"] in attempt.events().values())
    os.kill(child, signal.SIGSTOP)
    attempt.wait_for("the child to be stopped", lambda: process_state(child) in "tT")
    os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGUSR1)
    attempt.wait_for("the child to go on", lambda: ["ready", "term", "usr1"] in attempt.events().values())
    attempt.open_gate()
    record = json.loads(stop.communicate(timeout=60)[0])
    assert list(attempt.events().values()) == [["ready", "term", "usr1", "saved"]], attempt.events()
    target = record["targets"][0]
    assert record["status"] == 24 and target["source"] == "ptrace" and target["pid"] == child, record


@case
def first_thread_ended(attempt):
    """A program whose first thread has ended, so that it looks like a zombie, saves and is reported like another."""
    attempt.run(attempt.cmd(100, 28, "orphan") + "; true", "--linger", "0.2")
    attempt.wait_ready()
    child = next(iter(attempt.events()))
    attempt.wait_for("the first thread's end", lambda: process_state(child) == "Z")
    assert child in attempt.status()["processes"], attempt.status()
    record, _ = attempt.stop("--grace", "60")
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    assert record["status"] == 28 and record["killed"] == 0 and record["targets"][0]["pid"] == child, record


LAUNCHER = "python3 -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' "


@case
def wrapper_in_second_wave(attempt):
    """A wrapper that passes signals on is left alone while something lives below it: no second TERM."""
    launch = os.path.join(attempt.work, "launch")
    with open(launch, "w") as file:
        file.write("trap : TERM; " + LAUNCHER + attempt.cmd(800, 25) + "; sleep 30; true")
    attempt.run("timeout 60 bash " + launch, "--linger", "0.2")
    attempt.wait_ready()
    record, _ = attempt.stop("--grace", "20")
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    waves = {t["pid"]: t["wave"] for t in record["targets"]}
    assert waves[next(iter(attempt.events()))] == 2 and record["status"] == 143, record


@case
def wrapper_that_has_not_waited(attempt):
    """A wrapper is left alone, too, until it has waited for what it ran: it would pass a TERM on to what is left."""
    launch = os.path.join(attempt.work, "launch")
    with open(launch, "w") as file:
        file.write("trap : TERM; " + LAUNCHER + attempt.cmd(100, 25, "saved=" + attempt.gate()) + "; sleep 30; true")
    attempt.run("timeout 60 bash " + launch)
    attempt.wait_ready()
    wrapper = attempt.status()["pid"]
    shell, = children(wrapper)
    os.kill(wrapper, signal.SIGSTOP)
    attempt.wait_for("the wrapper to be stopped", lambda: process_state(wrapper) == "T")
    stop = attempt.start("stop", "--grace", "60", "--linger", "0.2")
    attempt.wait_for("the TERM", lambda: ["ready", "term"] in attempt.events().values())
    attempt.wait_for("the shell's end", lambda: process_state(shell) == "Z")
    time.sleep(0.5)  # the guard looks again, some ten times
    os.kill(wrapper, signal.SIGCONT)
    attempt.wait_for("the wrapper's end", lambda: has_ended(wrapper))
    attempt.open_gate()
    record = json.loads(stop.communicate(timeout=60)[0])
    assert list(attempt.events().values()) == [["ready", "term", "saved"]], attempt.events()
    assert wrapper not in [t["pid"] for t in record["targets"]], record


@case
def restarted(attempt):
    """A program that its shell starts again after the stop is stopped at once, with its shell, not after the linger."""
    attempt.run("while true; do " + attempt.cmd(200, 26) + "; done")
    attempt.wait_ready()
    record, took = attempt.stop("--grace", "60", "--linger", "30")
    said = list(attempt.events().values())
    assert said[0] == ["ready", "term", "saved"] and len(said) <= 2 and took < 25, (said, took)
    assert record["status"] == 26 and attempt.alive() == [], record


@case
def through_a_filter(attempt):
    """A program that reads another one's output through filters is none that is stopped."""
    filtered(attempt, "cat | tr a b", 2)


@case
def through_a_shell(attempt):
    """A program that reads another one's output through a shell's loop is none that is stopped."""
    filtered(attempt, "while read -r line; do echo \"$line\"; done", 1)


def filtered(attempt, filters, count):
    attempt.run(attempt.cmd(200, 27) + f" | {filters} | python3 -c 'import sys; sys.stdin.read(); print(1)'")
    attempt.wait_ready()
    # The program is ready before the shell has forked the others, and they before they have taken the pipes.
    attempt.wait_for("the filters", lambda: sum(b.startswith("pipe:") for _, a, b in attempt.ends()) == count + 1)
    attempt.wait_for("the reader", lambda: any("/python" in exe and a.startswith("pipe:") for exe, a, _ in attempt.ends()))
    # With that linger there is no second wave, however slow the reader is to start and to end.
    record, _ = attempt.stop("--grace", "60", "--linger", "60")
    assert [t["exe"] for t in record["targets"]] == [os.path.basename(attempt.suite.child)[:33]], record
    assert record["status"] == 27 and attempt.log() == b"1\n", (record, attempt.log())


@case
def shell_only(attempt):
    """A shell script that saves in its own trap gets the TERM when there is no program."""
    attempt.run("trap 'echo saved; exit 31' TERM; echo ready; while :; do sleep 0.1; done")
    attempt.wait_for("the script", lambda: attempt.log() == b"ready\n")
    record, took = attempt.stop("--grace", "60", "--linger", "30")
    # A child that has not become `sleep` yet is a shell too; of its end its parent tells.
    log = attempt.log().replace(b"Terminated\n", b"")
    assert record["status"] == 31 and log == b"ready\nsaved\n" and took < 25, (record, attempt.log(), took)


@case
def odd_names(attempt):
    """Names with quotes and bytes that are no UTF-8 leave the record valid JSON."""
    directory = os.path.join(attempt.work.encode(), b"q\"\\\n\xff")
    os.makedirs(directory)
    program = os.path.join(directory, b"p\"\\\n\xff")
    subprocess.run(["cp", attempt.suite.child, program], check=True)
    os.symlink(program, os.path.join(attempt.work, "p"))
    attempt.run("exec ./p " + attempt.cmd(100, 32).split(" ", 1)[1])
    attempt.wait_ready()
    record, _ = attempt.stop("--grace", "10")
    assert record["status"] == 32 and record["targets"][0]["exe"] == "p\"\\\n\xff", record


# The disk cases run in a user and mount namespace with a small tmpfs.

def in_namespace(function, options):
    def run(suite):
        attempt = Attempt(suite)
        place = os.path.join(attempt.work, "disk")
        os.makedirs(place)
        command = ["unshare", "-rm", sys.executable, os.path.abspath(__file__), suite.guard, suite.child, "--inside",
                   function.__name__, "--place", place, "--mount", options]
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
            raise Skip("user and mount namespaces are not allowed here: sysctl kernel.unprivileged_userns_clone=1")
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr

    CASES.append((function.__doc__.splitlines()[0].rstrip("."), run))
    return function


def fill(place):
    """Fill the disk to its last byte."""
    with open(os.path.join(place, "filler"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def disk_full_while_running(attempt, place):
    """A disk that fills up: the command sees no error, what is dropped is counted, the record is whole."""
    attempt.run(attempt.cmd(100, 41, "chatter=60000", "for=1"))
    attempt.wait_for("the first line", lambda: len(attempt.log()) >= 64)
    fill(place)
    record = attempt.record()
    assert record["status"] == 41, record
    assert "write-error" not in attempt.events()[record["leader"]["pid"]], attempt.events()
    assert record["dropped_bytes"] > 0 and record["log_bytes"] + record["dropped_bytes"] == 60000 * 64, record
    assert record["log_bytes"] == len(attempt.log()) and attempt.log()[:64] == lines(1)


def disk_full_before(attempt, place):
    """A full disk before the start: refused with the reason; when there is room again it starts."""
    attempt.stage("exit 42")
    fill(place)
    result = attempt.call("run")
    assert result.returncode == 1 and b"No space left" in result.stderr, result
    assert not os.path.exists(attempt.path("started")) and attempt.status()["state"] == "staged"
    os.unlink(os.path.join(place, "filler"))
    assert attempt.call("run").returncode == 0
    assert attempt.record()["status"] == 42


def disk_full_stop(attempt, place):
    """A stop before the start on a full disk fails, and succeeds when there is room again."""
    attempt.stage("exit 42")
    fill(place)
    result = attempt.call("stop")
    assert result.returncode == 1 and b"No space left" in result.stderr, result
    assert not os.path.exists(attempt.path("started")) and attempt.status()["state"] == "staged"
    os.unlink(os.path.join(place, "filler"))
    record, _ = attempt.stop()
    assert record["error"] == "stopped before it was started", record


def no_inodes(attempt, place):
    """A disk without a free inode: the refusal says that nothing was started."""
    attempt.stage("exit 43")
    made = 0
    try:
        while True:
            open(os.path.join(place, f"f{made}"), "w").close()
            made += 1
    except OSError:
        pass
    result = attempt.call("run")
    assert result.returncode == 1 and b"nothing was started" in result.stderr, result
    assert not os.path.exists(attempt.path("started"))


def log_kept_without_holes(attempt, place):
    """With --keep on a file system that makes no holes the log stays as small, and ends with the last words."""
    count, keep, words = 60000, 400000, 65536
    attempt.run(attempt.cmd(100, 8, f"chatter={count}", "for=1") + "; seq 100000; exit 8", "--keep", keep)
    live = attempt.call("follow", "--from", count * 64 - 640)
    record = attempt.record()
    whole = lines(count) + b"".join(b"%d\n" % i for i in range(1, 100001))
    first, stat = record["log_first"], os.stat(attempt.path("log"))
    assert record["log_bytes"] == len(whole) == stat.st_size and record["dropped_bytes"] == 0, record
    assert words <= record["log_bytes"] - first <= 2 * keep + 65536 and first > 2 * keep, record
    assert stat.st_blocks * 512 <= 2 * keep + 131072, stat
    # Who was too slow is told so. Nobody gets zeros.
    assert whole[count * 64 - 640:].startswith(live.stdout), len(live.stdout)
    assert live.returncode == 0 or b"is no longer kept" in live.stderr, live.stderr
    rest = attempt.call("follow", "--from", first)
    assert rest.returncode == 0 and rest.stdout == whole[first:], (rest.returncode, rest.stderr)
    assert attempt.call("follow", "--from", first - 1).returncode == 1


def log_kept_through_takeover_without_holes(attempt, place):
    """A guard that takes over where no holes are made finds the offsets as they were."""
    keep_through_takeover(attempt)


INSIDE = {f.__name__: in_namespace(f, o) for f, o in (
    (disk_full_while_running, "size=2m"), (disk_full_before, "size=1m"), (disk_full_stop, "size=1m"),
    (no_inodes, "size=4m,nr_inodes=40"),
    # ramfs cannot give a part of a file back, as NFS before 4.2 and many FUSE file systems cannot.
    (log_kept_without_holes, "ramfs"), (log_kept_through_takeover_without_holes, "ramfs"))}


def inside(arguments):
    """In the namespace: mount the small disk, put an attempt on it, run one case."""
    libc = ctypes.CDLL(None, use_errno=True)
    kind, options = (b"ramfs", b"") if arguments.mount == "ramfs" else (b"tmpfs", arguments.mount.encode())
    if libc.mount(kind, arguments.place.encode(), kind, 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    suite = Suite(arguments.guard, arguments.child, keep=True, root=os.path.dirname(arguments.place))
    attempt = Attempt(suite, directory=os.path.join(arguments.place, "attempt"))
    try:
        INSIDE[arguments.inside](attempt, arguments.place)
    finally:
        attempt.clear()
    suite.close()
    return suite.counts["failed"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("guard")
    parser.add_argument("child")
    parser.add_argument("--only")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--keep", action="store_true")
    for option in ("--inside", "--place", "--mount"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.guard, arguments.child = os.path.abspath(arguments.guard), os.path.abspath(arguments.child)
    if arguments.inside:
        return inside(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    suite = Suite(arguments.guard, arguments.child, arguments.keep)
    suite.only = arguments.only
    for name, function in CASES:
        suite.case(name, function, suite)
    return suite.run(arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
