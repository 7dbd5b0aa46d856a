#!/bin/sh
# The cost of SSH to many hosts: CPU of the client a host, memory a session, throughput of one session.
#
# Servers and client share the machine: CPU of the client is the figure, wall time is mostly the servers'. All hosts are
# addresses 127.1.x.y of one sshd whose shell reads no start-up file; each answers with a nonce. The comparisons take
# turns, with the same key exchange, keys and window: a bare libssh2 loop (tests/bench/ssh/bare.c, compiled here), ssh
# under xargs, pdsh and clush (installed from the distribution when root runs this), and parallel-ssh from PyPI in a
# virtual environment in the build directory. What cannot be had is named in "skipped". 4,096 sessions are held against
# a server on npm's ssh2 (node and npm needed). Ours executes nothing, which strace shows.
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD; BENCH_HOSTS ("64 256 1024"), BENCH_HELD (4096), BENCH_BYTES (1 GiB).
set -eu
cd "$(dirname "$0")/../.."
exec "${CIRANDA_BINARY:-$PWD/build/ciranda}" tests/bench/ssh/run.lua
