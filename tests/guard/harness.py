"""What the guard's tests share: attempts in a private directory, one line a case, one line at the end."""

import concurrent.futures
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback


class Skip(Exception):
    """The case cannot be run here; the text says what would enable it."""


class Suite:
    """Runs cases, a few at a time, and prints `ok`, `FAIL` or `skip` for each."""

    def __init__(self, guard, child, keep=False, root=None):
        self.guard, self.child, self.keep = guard, child, keep
        self.root = root or tempfile.mkdtemp(prefix="ciranda-guard-test-")
        if not root:
            os.chmod(self.root, 0o755)
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.lock = threading.Lock()
        self.cases = []
        self.only = None
        self.seed = int.from_bytes(os.urandom(4), "big")

    def case(self, name, function, *arguments):
        if self.only is None or self.only in name:
            self.cases.append((name, function, arguments))

    def _one(self, name, function, arguments):
        begin = time.monotonic()
        try:
            function(*arguments)
            kind, text = "passed", ""
        except Skip as skip:
            kind, text = "skipped", f": {skip}"
        except Exception as error:  # every failure of a case is a line, never the end of the suite
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = "failed"
            text = f": {type(error).__name__} {error} (line {place.lineno})"
        with self.lock:
            self.counts[kind] += 1
            if kind == "skipped":
                print(f"SKIP: {name.split(' [')[0]}{text}", flush=True)
            else:
                word = "ok  " if kind == "passed" else "FAIL"
                print(f"{word} {name} [{time.monotonic() - begin:.1f} s]{text}", flush=True)

    def _guards(self):
        """The processes of this suite's guards."""
        found = []
        for name in os.listdir("/proc"):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if name.isdigit() and len(words) > 2 and words[0] == self.guard.encode() and words[2].startswith(self.root.encode()):
                found.append(int(name))
        return found

    def run(self, jobs):
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for case in self.cases:
                pool.submit(self._one, *case)
        self.close()
        print("{passed} passed, {failed} failed, {skipped} skipped".format(**self.counts))
        return 1 if self.counts["failed"] or not self.counts["passed"] else 0

    def close(self):
        """Count what a sanitizer found as failures, and clear up when there is none."""
        deadline = time.monotonic() + 60
        while self._guards() and time.monotonic() < deadline:
            time.sleep(0.05)  # a sanitizer reports leaks when the guard ends
        reports = [name for name in os.listdir(self.root) if name.startswith("sanitizer")]
        for name in reports:
            self.counts["failed"] += 1
            print(f"FAIL sanitizer report {name}\n" + open(os.path.join(self.root, name)).read())
        if self.keep or self.counts["failed"]:
            print(f"kept {self.root}")
        else:
            shutil.rmtree(self.root, ignore_errors=True)


class Attempt:
    """One attempt directory, its child's journal, and the guard's subcommands on it."""

    def __init__(self, suite, user=None, directory=None):
        self.suite, self.user = suite, user
        self.nonce = secrets.token_hex(8)
        self.directory = directory or os.path.join(suite.root, self.nonce)
        self.work = os.path.join(suite.root, "w" + self.nonce)
        self.journal = os.path.join(self.work, "journal")
        for path in (self.directory, self.work):
            os.makedirs(path, exist_ok=True)
            if user:
                os.chown(path, user, user)

    def path(self, name):
        return os.path.join(self.directory, name)

    def cmd(self, save_ms=300, status=7, *options, child=None):
        words = [child or self.suite.child, self.journal, self.nonce, str(save_ms), str(status), *options]
        return " ".join(words)

    def stage(self, command, cwd=None, environment=None, shell="/bin/bash"):
        files = {"command": command.encode(), "cwd": (cwd or self.work).encode(), "shell": shell.encode()}
        if environment is not None:
            files["environment"] = environment
        for name, data in files.items():
            with open(self.path(name), "wb") as file:
                file.write(data)

    def start(self, subcommand, *options, **keywords):
        """A subcommand of the guard, in the background."""
        environment = dict(os.environ)
        for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):  # a guard has no standard error
            environment[name] = f"{environment.get(name, '')}:log_path={self.suite.root}/sanitizer"
        environment.update(keywords.pop("env", {}))
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords}
        return subprocess.Popen([self.suite.guard, subcommand, self.directory, *map(str, options)], env=environment,
                                user=self.user, group=self.user, extra_groups=[] if self.user else None, **streams)

    def call(self, subcommand, *options, timeout=60, **keywords):
        process = self.start(subcommand, *options, **keywords)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, command, *options, **staging):
        self.stage(command, **staging)
        result = self.call("run", *options)
        assert result.returncode == 0, (result.returncode, result.stderr)
        return json.loads(result.stdout)

    def status(self, *options):
        return json.loads(self.call("status", *options).stdout)

    def stop(self, *options):
        """The record and how long it took."""
        begin = time.monotonic()
        result = self.call("stop", *options)
        assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
        return json.loads(result.stdout), time.monotonic() - begin

    def events(self):
        """What the child's processes said: {pid: [event, ...]} in the order of their first line."""
        said = {}
        if os.path.exists(self.journal):
            with open(self.journal) as file:
                for line in file:
                    nonce, pid, event = line.split()
                    assert nonce == self.nonce, line
                    said.setdefault(int(pid), []).append(event)
        return said

    def gate(self, name="gate"):
        """A file that is not there yet, for which the attempt's command waits; `open_gate` makes it."""
        return os.path.join(self.work, name)

    def open_gate(self, name="gate"):
        open(self.gate(name), "w").close()

    def wait_for(self, what, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}; status {self.status()}"
            time.sleep(0.01)

    def wait_ready(self, count=1):
        self.wait_for("the child", lambda: sum("ready" in e for e in self.events().values()) >= count)

    def record(self, seconds=60):
        self.wait_for("the exit record", lambda: os.path.exists(self.path("exit")), seconds)
        with open(self.path("exit")) as file:
            return json.load(file)

    def log(self):
        with open(self.path("log"), "rb") as file:
            return file.read()

    def alive(self):
        """The processes that have the attempt's variable, read without the guard's help."""
        mark = f"CIRANDA_ATTEMPT_DIR={os.path.realpath(self.directory)}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/environ", "rb") as file, open(f"/proc/{name}/stat") as stat:
                        if mark in file.read().split(b"\0") and stat.read().rsplit(")", 1)[1].split()[0] not in "ZX":
                            found.append(int(name))
                except OSError:
                    pass
        return found

    def ends(self):
        """The executable, standard input and standard output of each of the attempt's processes."""
        found = []
        for pid in self.alive():
            try:
                found.append([os.readlink(f"/proc/{pid}/{name}") for name in ("exe", "fd/0", "fd/1")])
            except OSError:
                pass
        return found

    def clear(self):
        """End what a failed case has left: this attempt's guard, and what carries its variable."""
        if os.path.exists(self.path("started")) and not os.path.exists(self.path("exit")):
            try:
                self.call("stop", "--grace", "0", timeout=20)
            except subprocess.SubprocessError:
                pass
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass


class Holder:
    """A process of its own that holds a file open, and locked when asked, while the block runs. (The suite itself
    cannot: what it forks meanwhile for another case would hold it for a moment longer.)"""

    def __init__(self, path, lock=False):
        code = ("import fcntl, sys\nfile = open(sys.argv[1])\nif sys.argv[2]:\n    fcntl.flock(file, fcntl.LOCK_SH)\n"
                "print('held', flush=True)\nsys.stdin.read()")
        self.process = subprocess.Popen([sys.executable, "-c", code, path, "lock" if lock else ""],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self):
        assert self.process.stdout.readline() == b"held\n"
        return self.process

    def __exit__(self, *_):
        self.process.communicate()


def have(program):
    if not shutil.which(program):
        raise Skip(f"no {program} here: apt-get install {program}")
