#!/bin/sh
# A walk that is a directory of specs: walk_of_specs.sh NAME runs tests/e2e/NAME and counts for the last line.
set -u
cd "$(dirname "$0")/.." || exit 2
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
output=$(mktemp) || exit 2
trap 'rm -f "$output"' EXIT
# A case waits for boots and repairs, one after another.
CIRANDA_BINARY=$binary CIRANDA_TEST_TIMEOUT=300 "$binary" test "tests/e2e/$1" >"$output" 2>&1
status=$?
cat "$output"
sed -n "s/^\\([0-9]*\\) passed, \\([0-9]*\\) failed.*/{\"e2e\":\"$1\",\"passed\":\\1,\"failed\":\\2}/p" "$output" | tail -n 1
exit "$status"
