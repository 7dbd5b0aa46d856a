#!/bin/sh
# 10,000 queued resources listed in pages by ciranda and by google-api-python-client, alternating, against the same
# `ciranda sim`: CPU and memory of the client alone. CIRANDA_SHORT: 500, one round. BENCH_RESOURCES takes another number.
set -eu
name=bench-api
. "$(dirname -- "$0")/../e2e/clients/environment.sh"
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$root/tests/e2e/clients" exec "$python" "$root/tests/bench/api/run.py" "$binary"
