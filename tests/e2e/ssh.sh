#!/bin/sh
# Faults of SSH: each must end in a named error, in time, and each has a control in which it is absent.
#
#   faults    a scripted server on npm's ssh2 plays what OpenSSH does not show, one user name a fault
#   servers   OpenSSH's own: full, stopped, and output without an end of line
#   clock     a wall clock that jumps while something is waited for (libfaketime)
#   network   hosts that cannot be reached and a dead name server, in a network namespace of its own (root)
#   fanout    a fan-out under valgrind: no error, nothing lost
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD (ssh2 is installed into it once, without its native parts), CIRANDA_SHORT.
# A part whose tools are not there says SKIP. Arguments: the parts to run.
set -u
cd "$(dirname "$0")/../.." || exit 2
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
build=${CIRANDA_BUILD:-$PWD/build}
parts=${*:-faults servers clock network fanout}
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-ssh-e2e.XXXXXX")
chmod 755 "$scratch"
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0 skipped=0
unset SSH_AUTH_SOCK

skip() {
  printf 'SKIP: ssh %s: %s\n' "$1" "$2"
  skipped=$((skipped + 1))
}

# Run a part: a command whose last line says how many cases passed and failed.
part() {
  name=$1
  shift
  printf -- '-- %s\n' "$name"
  status=0
  "$@" >"$scratch/$name" 2>&1 || status=$?
  cat "$scratch/$name"
  line=$(grep '^{.*"part":' "$scratch/$name" | tail -n 1)
  good=$(printf '%s\n' "$line" | sed -n 's/.*"passed":\([0-9]*\).*/\1/p')
  bad=$(printf '%s\n' "$line" | sed -n 's/.*"failed":\([0-9]*\).*/\1/p')
  passed=$((passed + ${good:-0}))
  failed=$((failed + ${bad:-0}))
  if [ "$status" -ne 0 ] && [ "${bad:-0}" -eq 0 ]; then
    printf 'FAIL  %s: exit status %s\n' "$name" "$status"
    failed=$((failed + 1))
  fi
}

for name in $parts; do
  script=tests/e2e/ssh/$name.lua
  case $name in
  faults)
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
      skip faults "node and npm are not installed"
      continue
    fi
    server=$build/ssh-faults
    sh tests/fixtures/ssh_faults/install.sh "$server" || exit 1
    cp tests/fixtures/ssh_faults/server.js "$server/"
    part faults "$binary" "$script" "$server"
    ;;
  servers)
    part servers "$binary" "$script"
    ;;
  clock)
    library=
    for path in /usr/lib/*/faketime/libfaketime.so.1; do
      [ ! -e "$path" ] || library=$path
    done
    if [ -z "$library" ]; then
      skip clock "libfaketime is not installed"
      continue
    fi
    printf '+0\n' >"$scratch/now"
    part clock env LD_PRELOAD="$library" FAKETIME_TIMESTAMP_FILE="$scratch/now" FAKETIME_NO_CACHE=1 \
      FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 "$binary" "$script"
    ;;
  network)
    if [ "$(id -u)" -ne 0 ] || ! command -v ip >/dev/null || ! unshare -nm true 2>/dev/null; then
      skip network "a network namespace needs root, unshare and ip"
      continue
    fi
    part network unshare -nm "$binary" "$script"
    ;;
  fanout)
    if ! command -v valgrind >/dev/null; then
      skip fanout "valgrind is not installed"
      continue
    fi
    part fanout valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect \
      --show-leak-kinds=definite,indirect \
      "$binary" "$script"
    ;;
  *)
    printf 'ssh.sh: there is no part %s\n' "$name" >&2
    exit 2
    ;;
  esac
done
printf '{"e2e": "ssh", "passed": %s, "failed": %s, "skipped_parts": %s}\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
