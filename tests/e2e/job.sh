#!/bin/sh
# A job with nobody watching, through maintenance, the loss of a machine, a reset: tests/e2e/job.
# The last line is JSON: {"e2e":"job","passed":N,"failed":N}.
set -u
cd "$(dirname "$0")/../.." || exit 2
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
output=$(mktemp) || exit 2
trap 'rm -f "$output"' EXIT
# A case waits for boots and repairs, one after another.
CIRANDA_BINARY=$binary CIRANDA_TEST_TIMEOUT=300 "$binary" test tests/e2e/job >"$output" 2>&1
status=$?
cat "$output"
sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/{"e2e":"job","passed":\1,"failed":\2}/p' "$output" | tail -n 1
exit "$status"
