#!/bin/sh
# Workers' logs through connections that are cut again and again: real sshds, each behind a TCP relay that cuts. 64
# workers and 20 cuts each, 8 and 5 in the short form (CIRANDA_SHORT); CIRANDA_WORKERS and CIRANDA_CUTS take other numbers.
set -eu
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-e2e-logs.XXXXXX")
trap 'rm -rf "$scratch" || :' EXIT # what is still being written there is no verdict on the walk
mkdir -m 700 "$scratch/home" "$scratch/tmp"
env -u SSH_AUTH_SOCK -u GOOGLE_APPLICATION_CREDENTIALS -u CLOUDSDK_CONFIG -u CIRANDA_LUA_DIR -u CIRANDA_PATH \
  HOME="$scratch/home" TMPDIR="$scratch/tmp" XDG_CONFIG_HOME="$scratch/home/.config" \
  XDG_STATE_HOME="$scratch/home/.local/state" XDG_CACHE_HOME="$scratch/home/.cache" \
  "${CIRANDA_BINARY:-$PWD/build/ciranda}" tests/e2e/logs.lua "$scratch"
