#!/bin/sh
# Runs the walk tests/e2e/NAME.lua with a home, a state and a temporary directory of its own: private.sh NAME.
set -eu
cd "$(dirname "$0")/../../.."
name=$1
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-e2e-$name.XXXXXX")
trap 'rm -rf "$scratch" || :' EXIT # what is still being written there is no verdict on the walk
mkdir "$scratch/home" "$scratch/tmp"
env -u SSH_AUTH_SOCK -u GOOGLE_APPLICATION_CREDENTIALS -u CLOUDSDK_CONFIG -u CIRANDA_LUA_DIR -u CIRANDA_PATH \
  HOME="$scratch/home" TMPDIR="$scratch/tmp" XDG_CONFIG_HOME="$scratch/home/.config" \
  XDG_STATE_HOME="$scratch/home/.local/state" XDG_CACHE_HOME="$scratch/home/.cache" \
  CIRANDA_BINARY="${CIRANDA_BINARY:-$PWD/build/ciranda}" "${CIRANDA_BINARY:-$PWD/build/ciranda}" \
  "tests/e2e/$name.lua" "$scratch"
