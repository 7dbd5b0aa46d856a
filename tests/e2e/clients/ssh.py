"""paramiko on a worker, and what it raises when the machine or its sshd is not what it was; and
websocket-client, which talks to the worker's sshd through the relay of Identity-Aware Proxy.
"""

import base64
import contextlib
import struct
import urllib.parse
from pathlib import Path

import paramiko
import websocket
from google.cloud import tpu_v2

import cloud_tpu
import faults
from checks import check, equal


class Worker:
    """The first worker of a node, with the host key that the API gives for it."""

    def __init__(self, client, tpu, node):
        self.client = client
        self.cloud = client.cloud
        self.port = int(client.cloud.env["CIRANDA_SSH_PORT"])
        self.user = "walker"
        self.key = paramiko.ECDSAKey.generate()
        public = f"{self.user}:{self.key.get_name()} {self.key.get_base64()}"
        self.tpu = tpu
        node.metadata["ssh-keys"] = public
        name = client.called("ssh")
        self.name = f"{client.cloud.parent}/nodes/{name}"
        cloud_tpu.done(tpu.create_node(parent=client.cloud.parent, node_id=name, node=node))
        self.short = name
        self.look()

    def look(self):
        """Read where the worker is, and its host key."""
        self.address = self.tpu.get_node(name=self.name).network_endpoints[0].ip_address
        keys = {item.key: item.value for item in self.attributes(cloud_tpu.HOST_KEYS).items}
        self.host_key = paramiko.Ed25519Key(data=base64.b64decode(keys["ssh-ed25519"]))
        items = {item.key.lower(): item.value for item in self.attributes("").items}
        self.hostname = items["hostname"]

    def attributes(self, path):
        """The guest attributes of the worker below a path."""
        request = tpu_v2.GetGuestAttributesRequest(name=self.name, query_path=path)
        return self.tpu.get_guest_attributes(request).guest_attributes[0].query_value

    def write(self, path):
        """Write a small file by SFTP; raises what paramiko raises."""
        with self.connected() as ssh, ssh.open_sftp() as files, files.open(path, "w") as file:
            file.write("x" * 1000)

    def run(self, command, patience=faults.PATIENT):
        """The output of a command; raises what paramiko raises. `patience` is for the banner."""
        with self.connected(patience) as ssh:
            _, output, _ = ssh.exec_command(command, timeout=faults.PATIENT)
            return output.read().decode()

    @contextlib.contextmanager
    def connected(self, patience=faults.PATIENT):
        ssh = paramiko.SSHClient()
        place = f"[{self.address}]:{self.port}" if self.port != 22 else self.address
        ssh.get_host_keys().add(place, "ssh-ed25519", self.host_key)
        try:
            ssh.connect(
                self.address,
                self.port,
                username=self.user,
                pkey=self.key,
                timeout=faults.PATIENT,
                banner_timeout=patience,
                auth_timeout=faults.PATIENT,
                allow_agent=False,
                look_for_keys=False,
            )
            yield ssh
        finally:
            ssh.close()


def walk_sshd(client, worker):
    def fault(kind):
        return {"kind": kind, "name": worker.short, "worker": 0}

    def connect(**options):
        return worker.run("true", **options)

    # Hung up on: how far paramiko is then decides what it raises.
    hung_up = (paramiko.SSHException, ConnectionResetError, EOFError)
    # Refused by sshd, as when too many log in at once. A machine that is off is below.
    faults.expect(client, fault("ssh_refuse"), hung_up, connect)
    faults.expect(client, fault("ssh_reset"), hung_up, connect)
    faults.expect(
        client, fault("ssh_hang"), paramiko.SSHException, connect, text="banner", patience=1
    )
    stranger = paramiko.ECDSAKey.generate()
    worker.key, kept = stranger, worker.key
    client.raises(paramiko.AuthenticationException, connect)
    worker.key = kept
    equal(worker.run("echo again"), "again\n", "a command after all that")


def walk_disk(client, worker):
    """A disk that is full; where workers have no namespaces the simulator says that it cannot be."""
    worker.write("before")
    try:
        client.cloud.control("POST", f"nodes/{worker.short}/workers/0:fillDisk", {})
    except RuntimeError as error:
        check("it needs namespaces" in str(error), f"refused otherwise: {error}")
    else:
        client.raises(OSError, worker.write, "after", text="Failure")
        equal(worker.run("wc -c < before"), "1000\n", "what was written before")
    faults.struck.add("fillDisk")


# The tags of the relay's messages.
CONNECTED, DATA = 1, 4

# Seconds until a client of the relay gives up, its handshake behind it.
RELAY_PATIENCE = 1.5


def receive(relay):
    """The next message; an empty one stands for a closing frame, after which the client raises."""
    while True:
        message = relay.recv()
        if message:
            return message


def through_relay(worker, patience=faults.PATIENT):
    """How the worker's sshd begins, read through the relay: its banner and its key exchange."""
    cloud = worker.cloud
    query = urllib.parse.urlencode(
        {
            "project": cloud.env["CLOUDSDK_CORE_PROJECT"],
            "zone": cloud.env["CLOUDSDK_COMPUTE_ZONE"],
            "instance": worker.hostname,
            "interface": "nic0",
            "port": worker.port,
            "newWebsocket": "True",
        }
    )
    token = Path(cloud.env["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]).read_text().strip()
    relay = websocket.create_connection(
        f"{cloud.env['CIRANDA_IAP_URL']}/v4/connect?{query}",
        timeout=patience,
        header=[f"Authorization: Bearer {token}"],
        origin="bot:iap-tunneler",
        subprotocols=["relay.tunnel.cloudproxy.app"],
    )
    try:
        equal(struct.unpack(">H", receive(relay)[:2])[0], CONNECTED, "the relay's first message")
        banner = b"SSH-2.0-walk\r\n"
        relay.send_binary(struct.pack(">HI", DATA, len(banner)) + banner)
        said = b""
        while b"\r\n" not in said or len(said.partition(b"\r\n")[2]) < 6:
            message = receive(relay)
            if struct.unpack(">H", message[:2])[0] == DATA:
                said += message[6:]
        return said
    finally:
        relay.close(timeout=1)


def walk_relay(client, worker):
    def talk(**options):
        return through_relay(worker, **options)

    check(talk().startswith(b"SSH-2.0-OpenSSH"), "the worker's sshd does not greet")
    lost = (websocket.WebSocketConnectionClosedException, ConnectionResetError)
    for kind in ("relay_close", "relay_drop"):
        faults.expect(client, {"kind": kind, "name": worker.short, "worker": 0}, lost, talk)
    for kind in ("relay_mute", "relay_slow"):
        fault = {"kind": kind, "name": worker.short, "worker": 0}
        if kind == "relay_slow":
            fault["seconds"] = faults.SLOW
        faults.expect(
            client, fault, websocket.WebSocketTimeoutException, talk, patience=RELAY_PATIENCE
        )


def walk_machine(client, worker):
    cloud = client.cloud
    cloud.control("POST", f"nodes/{worker.short}/workers/0:changeHostKey", {})
    client.raises(paramiko.BadHostKeyException, worker.run, "true")
    faults.struck.add("changeHostKey")
    cloud.control("POST", f"nodes/{worker.short}/workers/0:halt", {})
    client.raises(paramiko.ssh_exception.NoValidConnectionsError, worker.run, "true")
    faults.struck.add("halt")


def walk(client):
    tpu = cloud_tpu.connect(client.cloud)
    worker = Worker(client, tpu, cloud_tpu.single())
    equal(worker.run("whoami"), "walker\n", "who is logged in")
    walk_sshd(client, worker)
    walk_relay(client, worker)
    walk_disk(client, worker)
    walk_machine(client, worker)
    cloud_tpu.done(tpu.delete_node(name=worker.name))
    client.raises(paramiko.ssh_exception.NoValidConnectionsError, worker.run, "true")
