#!/bin/sh
# From a command to the first line of all workers: multihost_runner against the same steps done with OpenSSH, on the
# simulator's sshd. CIRANDA_SHORT: 8 workers only, one round.
set -eu
scratch=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-bench-run.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/tmp"
env -u SSH_AUTH_SOCK -u CIRANDA_PATH HOME="$scratch/home" TMPDIR="$scratch/tmp" XDG_CONFIG_HOME="$scratch/home/.config" \
  XDG_STATE_HOME="$scratch/home/.local/state" XDG_CACHE_HOME="$scratch/home/.cache" \
  "${CIRANDA_BINARY:?}" "$(dirname "$0")/run.lua" "$scratch"
