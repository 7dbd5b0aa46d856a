#!/bin/sh
# A directory of 2,000 files, 30 MB, to 16 workers: CPU of the client and bytes on its sockets, against scp.
#
# The workers are addresses of one sshd, each with a directory of its own. scp runs once a worker, all at once: scp -r with
# the cipher that costs it least, with -C and without. Ours is fleet:push in one process, its start and its gzip included,
# over the connections and from worker to worker ("tree"). Then one file is changed and pushed again. What arrived is
# compared file by file. Bytes are those of the link between the client's network namespace and the workers', both ways
# ("sent": what left the client), for which root and unshare are needed; else they are not counted.
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD; BENCH_WORKERS (16), BENCH_ROUNDS (3).
set -eu
cd "$(dirname "$0")/../.."
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
if [ "${BENCH_NETWORK:-}" = own ]; then
  ip link set lo up
  unshare -n sleep 86400 &
  client=$!
  trap 'kill $client' EXIT
  trap 'exit 1' HUP INT TERM
  while [ "$(readlink /proc/$client/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.1; done
  ip link add name workers type veth peer name client
  ip link set client netns $client
  # Loopback addresses on a link: what the link carries is counted, and no packet has an address that could leave a machine.
  echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet
  ip addr flush dev lo
  ip addr add 127.0.0.1/32 dev lo
  number=1
  while [ $number -le "${BENCH_WORKERS:-16}" ]; do
    ip addr add 127.1.0.$number/16 dev workers
    number=$((number + 1))
  done
  ip link set workers up
  nsenter -n -t $client sh -ec 'echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet
    ip addr add 127.1.255.1/16 dev client
    ip link set client up'
  BENCH_CLIENT=$client "$binary" tests/bench/push/run.lua
elif [ "$(id -u)" = 0 ] && unshare -n sh -c 'ip link add name probe0 type veth peer name probe1 && nsenter -n -t $$ true' 2>/dev/null; then
  BENCH_NETWORK=own exec unshare -n sh "$0"
else
  exec "$binary" tests/bench/push/run.lua
fi
