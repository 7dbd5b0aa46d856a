"""parallel-ssh from PyPI, as bench-ssh measures it: parallel.py HOSTS_FILE POOL USER PORT KEY COMMAND, or "version"."""
import sys
from importlib.metadata import version

if sys.argv[1:] == ["version"]:
    print("parallel-ssh", version("parallel-ssh"), "on ssh2-python", version("ssh2-python"))
    sys.exit()

from pssh.clients import ParallelSSHClient  # noqa: E402  (its version is asked for without loading it)

hosts_file, pool, user, port, key, command = sys.argv[1:]
with open(hosts_file, encoding="ascii") as file:
    hosts = file.read().split()
client = ParallelSSHClient(
    hosts,
    user=user,
    port=int(port),
    pkey=key,
    pool_size=int(pool),
    num_retries=1,
    allow_agent=False,
    identity_auth=False,
)
for output in client.run_command(command):
    for line in output.stdout:
        print(line)
    if output.exit_code != 0:
        sys.exit(f"{output.host} ended with {output.exit_code}")
