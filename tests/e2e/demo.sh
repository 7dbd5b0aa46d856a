#!/bin/sh
# The main job on the simulated cloud, as a user would type it, and what of it can be seen from outside: evidence.json.
#
# HOME, the XDG directories and TMPDIR of everything that runs lie inside build/demo.
set -eu
cd "$(dirname "$0")/../.."
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
demo=${CIRANDA_BUILD:-$PWD/build}/demo
rm -rf "$demo"
mkdir -p "$demo/home" "$demo/tmp"
exec env -u SSH_AUTH_SOCK -u GOOGLE_APPLICATION_CREDENTIALS -u CLOUDSDK_CONFIG \
  HOME="$demo/home" TMPDIR="$demo/tmp" XDG_CONFIG_HOME="$demo/home/.config" XDG_STATE_HOME="$demo/home/.local/state" \
  XDG_CACHE_HOME="$demo/home/.cache" XDG_RUNTIME_DIR="$demo/tmp" \
  CIRANDA_BINARY="$binary" CIRANDA_DEMO="$demo" "$binary" tests/e2e/demo.lua "$@"
