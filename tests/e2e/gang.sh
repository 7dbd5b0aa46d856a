#!/bin/sh
# A gang of 1,024 members (256 slices of 4) that start together or not at all: 64 in the short form (CIRANDA_SHORT);
# CIRANDA_GANG takes another number of slices. All members are in one process, a server on npm's ssh2 (node and npm are
# needed), and each really runs the guard in a home directory of its own.
set -eu
cd "$(dirname "$0")/../.."
build=${CIRANDA_BUILD:-$PWD/build}
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
  echo '{"e2e": "gang", "skipped": "node and npm are not installed"}'
  exit 0
fi
server=$build/ssh-faults
sh tests/fixtures/ssh_faults/install.sh "$server"
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-e2e-gang.XXXXXX")
trap 'rm -rf "$scratch" || :' EXIT # what is still being written there is no verdict on the walk
mkdir "$scratch/home" "$scratch/tmp"
# Each session is a descriptor or more on both sides.
ulimit -n 16384 2>/dev/null || ulimit -n "$(ulimit -H -n)"
env -u SSH_AUTH_SOCK -u CIRANDA_LUA_DIR -u CIRANDA_PATH -u CIRANDA_SSH_PORT \
  HOME="$scratch/home" TMPDIR="$scratch/tmp" XDG_CONFIG_HOME="$scratch/home/.config" \
  XDG_STATE_HOME="$scratch/home/.local/state" XDG_CACHE_HOME="$scratch/home/.cache" NODE_PATH="$server/node_modules" \
  CIRANDA_BINARY="${CIRANDA_BINARY:-$PWD/build/ciranda}" "${CIRANDA_BINARY:-$PWD/build/ciranda}" \
  tests/e2e/gang.lua "$scratch"
