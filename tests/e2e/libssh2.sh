#!/bin/sh
# cmake/libssh2.sh: what it says and does without touching the network or the system's apt.
set -eu
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-libssh2.XXXXXX")
trap 'rm -rf "$scratch" || :' EXIT

fail() {
  printf 'libssh2.sh: %s\n' "$*" >&2
  exit 1
}

# An old libssh2, as far as pkg-config knows: whatever the system has.
mkdir -p "$scratch/pkgconfig"
printf 'Name: libssh2\nDescription: old\nVersion: 1.10.0\nLibs:\nCflags:\n' >"$scratch/pkgconfig/libssh2.pc"
export PKG_CONFIG_PATH="$scratch/pkgconfig"
# The archives below are away for good: they need not be tried again. Nor does anybody else's proxy know better.
unset http_proxy HTTP_PROXY all_proxy ALL_PROXY
FETCH_PAUSES=
export FETCH_PAUSES
run() {
  status=0
  sh cmake/libssh2.sh "$@" >"$scratch/output" 2>&1 || status=$?
}

# apt's sources, in both formats, that lead nowhere or are none of Debian's.
sources() {
  mkdir -p "$scratch/parts"
  printf '%s' "$2" >"$scratch/parts/$1"
  {
    printf 'Dir::Etc::SourceList "/dev/null";\nDir::Etc::SourceParts "%s/parts";\n' "$scratch"
    printf 'Acquire::Retries "0";\nAcquire::http::Proxy::127.0.0.1 "DIRECT";\n'
  } >"$scratch/apt.conf"
  export APT_CONFIG="$scratch/apt.conf"
}

run
[ "$status" -eq 1 ] || fail "it does not ask for a prefix"
grep -q usage "$scratch/output" || fail "it does not say how to use it"

mkdir -p "$scratch/there/lib/pkgconfig"
: >"$scratch/there/lib/pkgconfig/libssh2.pc"
run "$scratch/there"
[ "$status" -eq 0 ] && [ ! -s "$scratch/output" ] || fail "it is not silent when its work is done"

sources other.list 'deb http://127.0.0.1:9/ubuntu jammy main
'
run "$scratch/none"
[ "$status" -eq 1 ] || fail "it goes on without a Debian archive"
grep -q "names no Debian archive" "$scratch/output" || fail "it does not say that there is no Debian archive"
rm "$scratch/parts/other.list"

sources one.list '# comment
deb [arch=amd64 signed-by=/nonexistent.gpg] http://127.0.0.1:9/one-line stable main contrib
'
run "$scratch/none"
[ "$status" -eq 1 ] || fail "an archive that cannot be reached is no failure"
grep -q "http://127.0.0.1:9/one-line" "$scratch/output" || fail "it does not read one-line sources"
rm "$scratch/parts/one.list"

sources deb.sources '# comment
Types: deb
URIs: http://127.0.0.1:9/disabled
Suites: stable
Components: main
Enabled: no

Types: deb deb-src
URIs: http://127.0.0.1:9/deb822
Suites: other
 stable
Components: contrib main
Signed-By: /nonexistent.gpg
'
run "$scratch/none"
[ "$status" -eq 1 ] || fail "an archive that cannot be reached is no failure"
grep -q "http://127.0.0.1:9/deb822" "$scratch/output" || fail "it does not read deb822 sources"
if grep -q disabled "$scratch/output"; then
  fail "it uses a source that is disabled"
fi

# It left nothing behind.
[ ! -e "$scratch/none" ] || fail "it left a prefix behind"
set -- "$scratch"/none.work.*
[ ! -e "$1" ] || fail "it left its working directory behind"
echo '{"e2e": "libssh2", "passed": 5, "failed": 0}'
