#!/bin/sh
# Every test of the guard in a build directory: what it promises, and the signal matrix, each way of learning a status
# forced once. When this is root, once more as an ordinary user. The last line adds everything up.
#
#   tests/guard/run.sh [BUILD]     (build); a guard with sanitizers is taken where there is one
set -u
cd "$(dirname "$0")/../.." || exit 2
guard=${1:-build}/guard/ciranda-guard
child=${1:-build}/guard/ciranda-guard-child
[ -x "$guard-asan" ] && guard=$guard-asan
for program in "$guard" "$child"; do
  if [ ! -x "$program" ]; then
    echo "FAIL $program is not built"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
  fi
done
# The tree may lie where only root can read: both users get a copy.
place=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-guard.XXXXXX") || exit 2
trap 'rm -rf "$place"' EXIT
trap 'exit 130' INT TERM
chmod 755 "$place"
cp "$guard" "$place/ciranda-guard"
cp "$child" "$place/ciranda-guard-child"
cp tests/guard/*.py "$place"
chmod 755 "$place"/*
passed=0 failed=0 skipped=0

# Run a driver, show what it prints, add its counts.
count() {
  "$@" >"$place.output" 2>&1
  status=$?
  cat "$place.output"
  # shellcheck disable=SC2046 # three numbers
  set -- $(tail -n 1 "$place.output" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
  rm -f "$place.output"
  if [ $# -ne 3 ] || { [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; }; then
    echo "FAIL the driver ended with status $status"
    set -- "${1:-0}" 1 "${3:-0}"
  fi
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

# Both drivers, behind the command given.
both() {
  count "$@" python3 "$place/guard_test.py" "$place/ciranda-guard" "$place/ciranda-guard-child"
  count "$@" python3 "$place/matrix.py" "$place/ciranda-guard" "$place/ciranda-guard-child"
}

# A comment's line begins with a slash, or with an odd number of blanks before its star: `  *out = 1;` is code.
lines=$(cat engine/guard/*.[ch] | grep -cvE '^(  )*( \*|/\*|$)')
if [ "$lines" -lt 1500 ]; then
  echo "ok   $lines lines of code"
  passed=$((passed + 1))
else
  echo "FAIL $lines lines of code: the limit is 1,500, comments and blank lines not counted"
  failed=$((failed + 1))
fi
both env
count python3 "$place/matrix.py" "$place/ciranda-guard" "$place/ciranda-guard-child" \
  --method ptrace,pidfd,wait,unknown --device no
if [ "$(id -u)" -eq 0 ]; then
  echo "== as an ordinary user"
  both setpriv --reuid=nobody --regid=nogroup --clear-groups env TMPDIR=/tmp HOME=/
fi
if command -v aarch64-linux-gnu-gcc >/dev/null; then
  if aarch64-linux-gnu-gcc -std=c11 -D_GNU_SOURCE -Os -static -s -Wall -Wextra -Werror engine/guard/*.c -o "$place/arm"; then
    echo "ok   built for aarch64, $(wc -c <"$place/arm") bytes"
    passed=$((passed + 1))
  else
    echo "FAIL the build for aarch64"
    failed=$((failed + 1))
  fi
else
  echo "SKIP: the guard for aarch64: no aarch64-linux-gnu-gcc here: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
  skipped=$((skipped + 1))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
