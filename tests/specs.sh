#!/bin/sh
# Every spec, each file by a program of its own, three at once for two processors: most of their time is waiting.
# What a file printed is printed whole when it has ended. The last line adds everything up.
#
#   tests/specs.sh BINARY
set -u
cd "$(dirname "$0")/.." || exit 2
binary=${1:?"tests/specs.sh BINARY"}
results=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-specs.XXXXXX") || exit 2
trap 'rm -rf "$results"' EXIT
export binary results
# Specs wait for states: only what never comes may end one, and a busy machine takes minutes for what boots or installs.
CIRANDA_TEST_TIMEOUT=${CIRANDA_TEST_TIMEOUT:-300}
export CIRANDA_TEST_TIMEOUT

# Files that start clouds and servers come first, so that none of them is left running alone at the end.
for room in recipes run ssh sim program fleet cli; do
  printf '%s\n' tests/spec/"$room"/*_spec.lua
done >"$results/first"
{
  cat "$results/first"
  find tests/spec -name '*_spec.lua' | sort | grep -vxF -f "$results/first"
} >"$results/all"

# shellcheck disable=SC2016 # the variables are that shell's
xargs -P $(($(nproc) * 3 / 2)) -I FILE sh -c '
  output=$results/$(printf %s FILE | tr / _)
  "$binary" test FILE >"$output" 2>&1
  status=$?
  line=$(tail -n 1 "$output" | grep -E "^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$")
  if [ -z "$line" ] || { [ "$status" -ne 0 ] && expr "$line" : ".* 0 failed" >/dev/null; }; then
    printf "\nFAILED   FILE as a whole: exit status %s\n" "$status" >>"$output"
    tail -n 40 "$output" | sed "/^$/d" >"$output.end"
    cat "$output.end" >>"$output"
    printf "\n"  >>"$output"
    line="0 passed, 1 failed"
  fi
  printf "%s\n" "$line" >>"$results/lines"
  flock "$results/lock" cat "$output"
' <"$results/all"

awk '{ passed += $1; failed += $3; skipped += $5 }
  END {
    printf "\n%d passed, %d failed", passed, failed
    if (skipped) printf ", %d skipped", skipped
    print ""
    exit failed > 0
  }' "$results/lines"
