#!/bin/sh
# Checkpoint on signal with real JAX and Orbax on simulated slices: two slices of two workers, a JAX process each.
#
# jax and orbax-checkpoint come from PyPI into a virtual environment below the build directory, which is kept. Set
# CIRANDA_SHORT=1 for one stop, the run that resumes from it, and one job that does not save; JAX_PYTHON names the
# Python to use. The system's own is preferred, since workers do not see /home and /root.
set -eu
cd "$(dirname "$0")/../.."
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
place=${CIRANDA_BUILD:-$PWD/build}/e2e-jax
mkdir -p "$place"
place=$(cd "$place" && pwd -P)
if [ ! -e "$place/venv/complete" ]; then
  rm -rf "$place/venv"
  for python in ${JAX_PYTHON:-/usr/bin/python3 python3}; do
    "$python" -c 'import ensurepip, venv' 2>/dev/null && break
    python=
  done
  [ -n "$python" ] || { echo "no Python with the venv module found; set JAX_PYTHON" >&2; exit 1; }
  "$python" -m venv "$place/venv"
  . cmake/fetch.sh
  fetch "jax and orbax-checkpoint from PyPI" \
    "$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax orbax-checkpoint
  touch "$place/venv/complete"
fi
rm -rf "$place/state"
mkdir -p "$place/state/home" "$place/state/tmp"
exec env -u SSH_AUTH_SOCK -u GOOGLE_APPLICATION_CREDENTIALS -u CLOUDSDK_CONFIG \
  -u http_proxy -u https_proxy -u HTTP_PROXY -u HTTPS_PROXY \
  HOME="$place/state/home" TMPDIR="$place/state/tmp" XDG_CONFIG_HOME="$place/state/home/.config" \
  XDG_STATE_HOME="$place/state/home/.local/state" XDG_CACHE_HOME="$place/state/home/.cache" \
  XDG_RUNTIME_DIR="$place/state/tmp" CIRANDA_BINARY="$binary" CIRANDA_E2E="$place" \
  "$binary" tests/e2e/jax.lua "$@"
