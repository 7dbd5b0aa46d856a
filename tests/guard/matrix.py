#!/usr/bin/env python3
"""
The signal matrix: the ways people wrap a program, each under the guard, then asked to stop.

A case passes when the program got SIGTERM exactly once, its save finished, nothing was left alive, and the record tells
the program's own status. Save times, statuses and nonces are drawn at random (--seed repeats a run); most saves are
short, some last as long as --save has it.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time

from harness import Attempt, Skip, Suite, have

# name, what it needs, command. CMD is the program, F a file to write to.
WRAPPERS = [
    ("direct", (), "exec CMD"),
    ("TERM to the guard's own group", (), "exec CMD"),
    ("stop asked twice", (), "exec CMD"),
    ("bash -c single", (), "bash -c 'CMD'"),
    ("bash -c true && cmd", (), "bash -c 'true && CMD'"),
    ("bash -c cd; exec", (), "bash -c 'cd . && exec CMD'"),
    ("bash exec with process substitution", (), "bash -c 'exec CMD > >(tee F) 2>&1'"),
    ("nohup", (), "nohup CMD"),
    ("env", (), "env A=1 CMD"),
    ("stdbuf", (), "stdbuf -oL CMD"),
    ("timeout", (), "timeout 60 CMD"),
    ("timeout -k", (), "timeout -k 1 60 CMD"),
    ("sudo -n", ("sudo",), "sudo -n CMD"),
    ("bash trap, wait twice", (), "bash -c 'trap \"kill -TERM \\$p\" TERM; CMD & p=$!; wait $p; wait $p'"),
    ("bash trap, wait once", (), "bash -c 'trap \"kill -TERM \\$p\" TERM; CMD & p=$!; wait $p'"),
    ("dash -c single", (), "dash -c 'CMD'"),
    ("dash -c cmd; true", (), "dash -c 'CMD; true'"),
    ("bash -c cmd; true", (), "bash -c 'CMD; true'"),
    ("bash -c cmd; true, asked twice", (), "bash -c 'CMD; true'"),
    ("bash pipe tee", (), "bash -c 'CMD 2>&1 | tee F'"),
    ("bash pipefail tee", (), "bash -c 'set -o pipefail; CMD 2>&1 | tee F'"),
    ("bash pipefail tee, group", (), "bash -c 'set -o pipefail; CMD 2>&1 | tee F'"),
    ("setsid", (), "setsid CMD"),
    ("setsid --fork --wait", (), "bash -c 'setsid --fork --wait CMD'"),
    ("xargs", (), "bash -c 'echo x | xargs -I{} CMD'"),
    ("tini", ("tini",), "tini -s -- bash -c 'CMD; true'"),
    ("tini -g", ("tini",), "tini -s -g -- bash -c 'CMD; true'"),
    ("dumb-init", ("dumb-init",), "dumb-init bash -c 'CMD; true'"),
    ("su -c", ("su",), "su -c 'cd . ; exec CMD' root"),
]
FURTHER = [
    ("two forked workers", (), "CMD workers; true"),
    ("pipe to a program", (), "CMD | python3 -c 'import sys\nfor line in sys.stdin: pass'"),
    ("while true", (), "while true; do CMD; done"),
    ("cmd; sleep 1; echo post", (), "CMD; sleep 1; echo post"),
    ("launcher that forwards nothing", (), "python3 -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' CMD"),
    ("yes | cmd", (), "yes | CMD"),
    ("sudo -n bash -c", ("sudo",), "sudo -n bash -c 'CMD; true'"),
    ("script -qec", ("script",), "script -qec 'CMD' /dev/null"),
    ("shell that traps TERM itself", (), "trap 'echo trapped' TERM; CMD; true"),
    ("cmd & wait", (), "CMD & wait"),
    ("cmd & sleep 30 & wait", (), "CMD & sleep 30 & wait"),
]


def needs(programs):
    for program in programs:
        have(program)
        if program == "su" and os.geteuid() != 0:
            raise Skip("su asks an ordinary user for a password: run as root")
        if program == "sudo" and os.geteuid() != 0:
            raise Skip("sudo makes the program root's, which only root may signal: run as root")
        if program == "sudo" and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode != 0:
            raise Skip("sudo -n does not work here: allow it in sudoers")


def shape(suite, name, programs, command, device, method, save_ms, status):
    needs(programs)
    attempt = Attempt(suite)
    try:
        options = ["--linger", "0.5", "--grace", "30", "--method", method, "--devices", os.path.join(attempt.work, "accel")]
        extra = []
        if device:
            open(os.path.join(attempt.work, "accel0"), "w").close()
            extra = ["device=" + os.path.join(attempt.work, "accel0")]
        attempt.run(command.replace("CMD", attempt.cmd(save_ms, status, *extra)).replace(
            " F", " " + os.path.join(attempt.work, "out")), *options)
        attempt.wait_ready()
        guard = attempt.status()
        if "group" in name:
            os.killpg(os.getpgid(guard["guard"]), signal.SIGTERM)
        elif "twice" in name:
            asked = subprocess.Popen([suite.guard, "stop", attempt.directory, "--grace", "30", "--linger", "0.5"],
                                     stdout=subprocess.DEVNULL)
            time.sleep(0.1)
            attempt.stop("--grace", "30", "--linger", "0.5")
            assert asked.wait(30) == 0
        else:
            attempt.stop("--grace", "30", "--linger", "0.5")
        record = attempt.record()
        events = attempt.events()
        first = next(iter(events.values()))
        assert first == ["ready", "term", "saved"], f"the program said {first}"
        for pid, said in list(events.items())[1:]:  # started again before its shell was stopped
            assert said.count("term") <= 1, f"process {pid} said {said}"
        assert attempt.alive() == [], "something is left alive"
        targets = [t for t in record["targets"] if t["wave"] == 1]
        child = [t for t in record["targets"] if t["pid"] == next(iter(events))]
        assert len(child) == 1 and child[0]["signalled"], record
        assert len(targets) == 1, f"the first wave was {targets}"
        own = "launcher" not in name or device
        if method in ("auto", "pidfd", "ptrace") and (own or method == "auto"):
            known = child[0]["source"] != "unknown" or record["leader"]["pid"] == child[0]["pid"]
            assert known and (child[0]["code"] == status or child[0]["code"] is None), record
        if not own:
            assert record["status"] == (143 if method != "unknown" else record["status"]), record
        elif method == "unknown":
            assert record["status_source"] == "leader: targets unknown", record
            assert all(t["source"] == "unknown" and t["code"] is None for t in targets), record
        elif method == "wait" and child[0]["source"] == "unknown":
            assert record["status_source"] in ("leader: targets unknown", "target: others unknown"), record
        else:
            assert record["status"] == status, record
        assert record["takeovers"] == 0, "the guard died"
        assert record["killed"] == 0 and record["stopped"] is True, record
    finally:
        attempt.clear()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("guard")
    parser.add_argument("child")
    parser.add_argument("--method", default="auto", help="comma separated: auto wait pidfd ptrace unknown")
    parser.add_argument("--device", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--save", default="0.2-4", help="seconds, a range")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    suite = Suite(os.path.abspath(arguments.guard), os.path.abspath(arguments.child), arguments.keep)
    suite.only = arguments.only
    seed = arguments.seed if arguments.seed is not None else suite.seed
    print(f"seed {seed}")
    draw = random.Random(seed)
    low, high = (float(x) for x in arguments.save.split("-"))
    for method in arguments.method.split(","):
        for device in {"no": (False,), "yes": (True,), "both": (False, True)}[arguments.device]:
            for name, programs, command in WRAPPERS + FURTHER:
                suite.case(f"{name} [{'device' if device else 'no device'}, {method}]", shape, suite, name, programs,
                           command, device, method, int(1000 * (low + (high - low) * draw.random() ** 8)), draw.randint(1, 120))
    return suite.run(arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
