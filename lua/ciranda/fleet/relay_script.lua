--- What a worker runs while files go from worker to worker (`ciranda.fleet.relay`), in Python: wherever people train
--- there is one, and nothing need be installed.
--
-- It hears the runner on its standard input, which begins with the program itself, and answers on its standard output,
-- in lines; the secrets come in the first one. What it keeps is a file without a name, so that nothing is left however
-- it ends; and it ends when its input does, or has been silent for too long. To others it gives the archive as it came,
-- encrypted, and only to who can answer its challenge with the push's token.
local M = {}

--- Exit statuses for a worker that cannot take part.
M.NO_PYTHON, M.NO_OPENSSL = 91, 92

-- The system's python3 will do, and a version manager's may be a stub that fails. The command line stays short: lists
-- of processes and messages show it.
M.START = [[command -v openssl >/dev/null || exit {openssl}; ]]
  .. [[[ ! -x /usr/bin/python3 ] || exec /usr/bin/python3 -ISc {loader}; ]]
  .. [[! python3 -ISc "" 2>/dev/null || exec python3 -ISc {loader}; exit {python}]]

--- Reads the program, whose size in bytes stands in place of SIZE, and runs it.
M.LOADER = [[
# ciranda-push: files from worker to worker
import os
text = b""
while len(text) < SIZE:
    text += os.read(0, SIZE - len(text)) or os._exit(1)
exec(text)
]]

M.SCRIPT = [[
import hashlib, hmac, json, os, select, signal, socket, subprocess, sys, tempfile, threading, time

CHUNK, GUESTS = 1 << 18, 16
children, buffer = [], b""


def say(*words):
    text = " ".join(str(word) for word in words).replace("\n", " ")
    os.write(1, ("ciranda-push " + text + "\n").encode("utf-8", "replace"))


def leave(*_):
    for child in children:
        try:
            child.kill()
        except OSError:
            pass
    os._exit(0)


def heard(limit):
    if not select.select([0], [], [], SILENCE)[0]:
        leave()
    data = os.read(0, limit)
    if not data:
        leave()
    return data


def line():
    global buffer
    while b"\n" not in buffer:
        buffer += heard(CHUNK)
    text, buffer = buffer.split(b"\n", 1)
    return text.decode()


def from_runner(limit):
    global buffer
    if not buffer:
        return heard(limit)
    data, buffer = buffer[:limit], buffer[limit:]
    return data


def exactly(peer, size):
    data, end = b"", time.monotonic() + order["connect"]
    while len(data) < size:
        peer.settimeout(max(0.001, end - time.monotonic()))
        more = peer.recv(size - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data


def answer(nonce):
    return hmac.new(token, nonce, "sha256").digest()


def store(more):
    kept.seek(0)
    left, digest = order["size"], hashlib.sha256()
    while left:
        data = more(min(left, CHUNK))
        digest.update(data)
        try:
            kept.write(data)
            kept.flush()
        except OSError as problem:
            done(1, "keeping what came: %s" % problem)
            leave()
        left -= len(data)
    if digest.hexdigest() != order["sha256"]:
        raise OSError("what came was not what was sent")


def fetch(address, port):
    late = "no connection within %(connect)g s: does a firewall keep workers from each other's TCP ports?"
    try:
        with socket.create_connection((address, int(port)), order["connect"]) as peer:
            late = "it took the connection and did not answer within %(connect)g s"
            peer.sendall(answer(exactly(peer, 32)))
            peer.settimeout(order["stall"])
            late = "nothing came for %(stall)g s"
            mark, got = time.monotonic(), 0

            def more(limit):
                nonlocal mark, got
                data = peer.recv(limit)
                if not data:
                    raise OSError("it was cut off")
                got += len(data)
                now = time.monotonic()
                if now - mark > order["stall"]:
                    if got < order["stall"] * order["slowest"]:
                        raise OSError("it came too slowly")
                    mark, got = now, 0
                return data

            store(more)
    except socket.timeout:
        return say("failed", late % order)
    except Exception as problem:
        return say("failed", problem or type(problem).__name__)
    use()


def host(guest, room):
    try:
        guest.settimeout(order["connect"])
        nonce = os.urandom(32)
        guest.sendall(nonce)
        if hmac.compare_digest(exactly(guest, 32), answer(nonce)):
            guest.settimeout(order["stall"])
            place = 0
            while place < order["size"]:
                data = os.pread(kept.fileno(), CHUNK, place)
                guest.sendall(data)
                place += len(data)
    except OSError:
        pass
    finally:
        guest.close()
        room.release()


def welcome(door):
    room = threading.BoundedSemaphore(GUESTS)
    while True:
        guest = door.accept()[0]
        if room.acquire(False):
            threading.Thread(target=host, args=(guest, room), daemon=True).start()
        else:
            guest.close()


def serve():
    seen = os.environ.get("SSH_CONNECTION", "").split()
    problem = "it knows no address of its own"
    for address in [order.get("address")] + seen[2:3]:
        try:
            if address:
                info = socket.getaddrinfo(address, 0, 0, socket.SOCK_STREAM)[0]
                door = socket.socket(info[0], info[1])
                door.bind(info[4])
                door.listen(GUESTS)
                threading.Thread(target=welcome, args=(door,), daemon=True).start()
                return say("have", *door.getsockname()[:2])
        except OSError as other:
            problem = "%s: %s" % (address, other)
    say("alone", problem)


def done(code, words):
    say("done", code, words.encode("utf-8", "replace")[-1500:].hex())


def use():
    serve()
    try:
        unpack()
    except Exception as problem:
        say("broken", problem or type(problem).__name__)


def unpack():
    try:
        destination = os.fsdecode(bytes.fromhex(order["destination"]))
        os.makedirs(destination, exist_ok=True)
    except OSError as problem:
        return done(1, str(problem))
    inside, outside = os.pipe()
    os.write(outside, order["key"].encode() + b"\n")
    os.close(outside)
    os.lseek(kept.fileno(), 0, 0)
    words = ["openssl", "enc", "-d", "-aes-256-ctr", "-pbkdf2", "-iter", "1", "-md", "sha256"]
    pipe = subprocess.PIPE
    opener = subprocess.Popen(
        words + ["-pass", "fd:%d" % inside], stdin=kept, stdout=pipe, stderr=pipe, pass_fds=[inside]
    )
    children.append(opener)
    tar = subprocess.Popen(
        ["tar", "-xzpf", "-", "--no-same-owner", "-C", destination], stdin=opener.stdout, stderr=pipe
    )
    children.append(tar)
    os.close(inside)
    opener.stdout.close()
    words = tar.communicate()[1].decode("utf-8", "replace")
    problem = opener.stderr.read().decode("utf-8", "replace")
    if opener.wait() > 0:
        return say("broken", "openssl: " + problem.strip()[:500])
    done(tar.returncode if tar.returncode >= 0 else 128 - tar.returncode, words)


SILENCE = 300
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGHUP, leave)
order = json.loads(line())
SILENCE, token = order["silence"], bytes.fromhex(order["token"])
try:
    kept = tempfile.TemporaryFile(dir=".")
except OSError as problem:
    done(1, "keeping what comes: %s" % problem)
    leave()
say("ready")
while True:
    word, *rest = line().split()
    if word == "receive":
        try:
            store(from_runner)
            threading.Thread(target=use, daemon=True).start()
        except OSError as problem:
            say("broken", problem)
    elif word == "fetch":
        threading.Thread(target=fetch, args=rest, daemon=True).start()
]]

return M
