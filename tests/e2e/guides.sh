#!/bin/sh
# Google's guides, typed as they say: recovery from failures in a Multislice environment, and Autocheckpoint on one TPU VM
# and on several slices. The training programs are stand-ins with the guides' own command lines: tests/e2e/guides.
# The short form (CIRANDA_SHORT) has two of the four cases.
# The last line is JSON: {"e2e":"guides","passed":N,"failed":N}.
set -u
cd "$(dirname "$0")/../.." || exit 2
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
output=$(mktemp) || exit 2
trap 'rm -f "$output"' EXIT
CIRANDA_BINARY=$binary CIRANDA_TEST_TIMEOUT=300 "$binary" test tests/e2e/guides >"$output" 2>&1
status=$?
cat "$output"
sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/{"e2e":"guides","passed":\1,"failed":\2}/p' "$output" | tail -n 1
exit "$status"
