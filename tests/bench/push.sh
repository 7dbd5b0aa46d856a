#!/bin/sh
# A directory of 2,000 files, 30 MB, to 16 workers: CPU of the client and bytes on its sockets, against scp.
#
# The workers are addresses 127.1.0.x of one sshd, each with a directory of its own. scp runs once a worker, all at once:
# scp -r with the cipher that costs it least, with -C and without. Ours is fleet:push in one process, its start and its
# gzip included. Then one file is changed and pushed again. What arrived is compared file by file. Bytes are those of the
# loopback device, both ways, in a network namespace of our own (root and unshare; else they are not counted).
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD; BENCH_WORKERS (16), BENCH_ROUNDS (3).
set -eu
cd "$(dirname "$0")/../.."
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
if [ "$(id -u)" = 0 ] && unshare -n ip link set lo up 2>/dev/null; then
  exec unshare -n sh -c 'ip link set lo up && BENCH_OWN_NETWORK=1 exec "$0" tests/bench/push/run.lua' "$binary"
fi
exec "$binary" tests/bench/push/run.lua
