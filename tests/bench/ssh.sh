#!/bin/sh
# The cost of SSH to many hosts: CPU of the client a host, memory a session, throughput of one session.
#
# Servers and client share the machine: CPU of the client is the figure, wall time is mostly the servers'. All hosts are
# addresses 127.1.x.y of one sshd whose shell reads no start-up file. The comparisons run in the same minutes, and only
# those that are installed: a bare libssh2 loop (tests/bench/ssh/bare.c, compiled here), ssh under xargs -P64, pdsh
# -f64, clush -f64, all with curve25519, which is the cheapest for them. 4,096 sessions are held against a server on
# npm's ssh2 (node and npm needed).
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD; BENCH_HOSTS ("64 256 1024"), BENCH_HELD (4096), BENCH_BYTES (1 GiB).
set -eu
cd "$(dirname "$0")/../.."
exec "${CIRANDA_BINARY:-$PWD/build/ciranda}" tests/bench/ssh/run.lua
