#!/bin/sh
# Every test: the specs and the guard's tests in both builds, the specs as an unprivileged account when this is root,
# the short form of each walk (tests/e2e) and fuzz target (tests/fuzz). The last line adds everything up.
#
#   tests/run.sh [PART...]     parts: lint spec guard asan account e2e fuzz; all of them without one
set -u
cd "$(dirname "$0")/.." || exit 2
root=$PWD
parts=${*:-lint spec guard asan account e2e fuzz}
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-test.XXXXXX")
chmod 755 "$scratch"
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0 skipped=0

say() {
  printf '\n== %s\n' "$*"
}

# One failure, told here and again at the end (a log is often cut in its middle): its name, and what is known of it on
# standard input. What failed in it is read there and in the file FULL; the names alone are told last.
#   fail NAME [FULL]
fail() {
  printf '%s\n' "$1"
  cat >"$scratch/block"
  {
    printf '\n-- %s\n' "$1"
    cat "$scratch/block"
  } >>"$scratch/failures"
  {
    printf '%s\n' "$1"
    grep -E -A 2 '^(FAILED|ERROR|FAIL) ' "${2:-/dev/null}" | cut -c 1-200 | sed 's/^/  /'
  } >>"$scratch/names"
  failed=$((failed + 1))
}

# Run a command that ends with "N passed, N failed[, N skipped]" and add its counts; a run without that line, or one
# that exits non-zero with no failure counted, is a failure of its own.
count() {
  title=$1
  shift
  say "$title"
  "$@" >"$scratch/output" 2>&1
  status=$?
  cat "$scratch/output"
  line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$scratch/output" | tail -n 1)
  grep -E '^SKIP: ' "$scratch/output" | sed "s|^|$title: |" >>"$scratch/skips"
  # The first lines of each failed spec, which the time that its file took ends, and of the guard's tests.
  awk '/^(FAILED|ERROR)  */ { left = 25 } /^[0-9.]+ s$/ { left = 0 } left-- > 0 || /^FAIL /' \
    "$scratch/output" >"$scratch/blocks"
  if [ -z "$line" ]; then
    tail -n 40 "$scratch/output" >"$scratch/blocks"
    fail "$title: no closing line (exit status $status)" "$scratch/output" <"$scratch/blocks"
    return
  fi
  # shellcheck disable=SC2046 # three or two numbers
  set -- $(printf '%s\n' "$line" | tr -cs '0-9' ' ')
  passed=$((passed + $1))
  skipped=$((skipped + ${3:-0}))
  if [ "$2" -ne 0 ]; then
    fail "$title: $2 failed" "$scratch/output" <"$scratch/blocks"
    failed=$((failed + $2 - 1))
  elif [ "$status" -ne 0 ]; then
    tail -n 40 "$scratch/output" >"$scratch/blocks"
    fail "$title: exit status $status with no failure counted" "$scratch/output" <"$scratch/blocks"
  fi
}

# Run a command whose exit status is the result: one test. One that did nothing says so in its closing JSON: skipped.
one() {
  title=$1
  shift
  say "$title"
  status=0
  "$@" >"$scratch/output" 2>&1 || status=$?
  cat "$scratch/output"
  grep -E '^SKIP: ' "$scratch/output" | sed "s|^|$title: |" >>"$scratch/skips"
  reason=$(tail -n 1 "$scratch/output" | sed -n 's/^{.*"skipped": *"\([^"]*\)".*}$/\1/p')
  if [ "$status" -ne 0 ]; then
    tail -n 40 "$scratch/output" >"$scratch/blocks"
    fail "$title: exit status $status" "$scratch/output" <"$scratch/blocks"
  elif [ -n "$reason" ]; then
    printf 'SKIP: %s: %s\n' "$title" "$reason" | tee -a "$scratch/skips"
    skipped=$((skipped + 1))
  else
    passed=$((passed + 1))
  fi
}

# Run a command as an account that may do nothing special, in its own copy of the tree, with an environment of its own.
account=$scratch/account
as_account() {
  (cd "$account/tree" && exec setpriv --reuid=nobody --regid=nogroup --clear-groups env -i PATH="$PATH" LANG=C.UTF-8 \
    HOME="$account/home" TMPDIR="$account/tmp" SHELL=/bin/sh USER=nobody CI="${CI:-}" \
    CIRANDA_BINARY="$account/tree/build/ciranda" CIRANDA_BUILD="$account/tree/build" "$@")
}

for part in $parts; do
  case $part in
  lint)
    one "luacheck" luacheck -q lua recipes tests cmake
    one "clang-format" sh -c 'clang-format --dry-run -Werror engine/*.[ch] engine/guard/*.[ch] tests/guard/*.c'
    one "cppcheck" sh -c 'cppcheck --enable=warning,performance,portability --inline-suppr --quiet --std=c11 \
      --error-exitcode=1 -Iengine engine/*.c'
    one "clang-tidy" sh -c 'for file in engine/*.c; do clang-tidy -p build --quiet "$file" 2>/dev/null || exit 1; done'
    ;;
  spec)
    count "specs" env CIRANDA_BINARY="$root/build/ciranda" sh tests/specs.sh build/ciranda
    ;;
  guard)
    count "guard" sh tests/guard/run.sh build
    ;;
  asan)
    if { [ -f build/asan/build.ninja ] || cmake --preset asan; } >"$scratch/asan" 2>&1 &&
      cmake --build build/asan >>"$scratch/asan" 2>&1; then
      ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:exitcode=99 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        CIRANDA_BINARY="$root/build/asan/ciranda"
      export ASAN_OPTIONS UBSAN_OPTIONS CIRANDA_BINARY
      count "specs under ASan and UBSan" sh tests/specs.sh build/asan/ciranda
      count "guard under ASan and UBSan" sh tests/guard/run.sh build/asan
      unset ASAN_OPTIONS UBSAN_OPTIONS CIRANDA_BINARY
    else
      cat "$scratch/asan"
      tail -n 40 "$scratch/asan" >"$scratch/blocks"
      fail "the ASan build failed" <"$scratch/blocks"
    fi
    ;;
  account)
    if [ "$(id -u)" -ne 0 ]; then
      continue
    fi
    # The tree may lie where only root can read: the account gets a copy of what the specs use.
    mkdir -p "$account/tree/build" "$account/home" "$account/tmp"
    git ls-files -z tests lua recipes docs cmake engine README.md | xargs -0 cp --parents -t "$account/tree"
    cp build/ciranda "$account/tree/build/"
    chown -R nobody "$account"
    count "specs as an unprivileged account" as_account sh tests/specs.sh build/ciranda
    one "the demonstration as an unprivileged account" as_account sh tests/e2e/demo.sh
    ;;
  e2e | fuzz)
    for script in tests/"$part"/*.sh; do
      [ -e "$script" ] || continue
      name=$part-$(basename "$script" .sh)
      one "$name" env CIRANDA_SHORT=1 CIRANDA_BINARY="$root/build/ciranda" CIRANDA_BUILD="$root/build" sh "$script"
    done
    ;;
  *)
    printf 'tests/run.sh: there is no part %s\n' "$part" >&2
    exit 2
    ;;
  esac
done

# In CI a skip that is not expected there is a failure: something was not installed.
if [ -n "${CI:-}" ] && [ -s "$scratch/skips" ]; then
  while IFS= read -r skip; do
    expected=no
    while IFS= read -r name; do
      case $name in
      "" | "#"*) continue ;;
      esac
      case $skip in
      *"SKIP: $name: "*) expected=yes ;;
      esac
    done <tests/expected_skips.txt
    if [ "$expected" = no ]; then
      fail "unexpected skip: $skip" </dev/null
    fi
  done <"$scratch/skips"
fi
if [ -s "$scratch/failures" ]; then
  say "what failed"
  cat "$scratch/failures"
  say "what failed, by name"
  head -n 40 "$scratch/names"
fi
printf '\n'
if [ "$skipped" -gt 0 ]; then
  printf '%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
else
  printf '%s passed, %s failed\n' "$passed" "$failed"
fi
[ "$failed" -eq 0 ]
