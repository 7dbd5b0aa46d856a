#!/bin/sh
# The runner killed in many places, and taken up again: nothing is forgotten, run twice, lost or doubled. 200 places, 20
# in the short form (CIRANDA_SHORT); CIRANDA_KILLS takes another number, CIRANDA_SEED repeats a day. Needs strace.
set -eu
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-e2e-kill.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/tmp"
env -u SSH_AUTH_SOCK -u GOOGLE_APPLICATION_CREDENTIALS -u CLOUDSDK_CONFIG -u CIRANDA_LUA_DIR -u CIRANDA_PATH \
  HOME="$scratch/home" TMPDIR="$scratch/tmp" XDG_CONFIG_HOME="$scratch/home/.config" \
  XDG_STATE_HOME="$scratch/home/.local/state" XDG_CACHE_HOME="$scratch/home/.cache" \
  CIRANDA_BINARY="${CIRANDA_BINARY:-$PWD/build/ciranda}" "${CIRANDA_BINARY:-$PWD/build/ciranda}" \
  tests/e2e/kill.lua "$scratch"
