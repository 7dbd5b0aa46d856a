#!/bin/sh
# Clients that others wrote against an unmodified `ciranda sim`: google-cloud-tpu, google-api-python-client,
# google-cloud-storage, google-auth, curl and paramiko. docs/sim-clients.md says what is shown.
#
#     tests/e2e/clients.sh [--only "NAME;..."] [--sabotage NAME] [--list]
#
#   --only       these clients only
#   --sabotage   alter one field of the simulator's answers: the run must fail
#   --list       the names of clients and sabotages
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD (the Python environment is made in its e2e-clients and kept),
# CLIENTS_PYTHON (the Python to use). The packages come from PyPI. There is one length of the run, a minute or so.
# The last line is one JSON object; the exit status is 0 when everything held.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
build=${CIRANDA_BUILD:-$root/build}
binary=${CIRANDA_BINARY:-$build/ciranda}
requirements=$root/tests/e2e/clients/requirements.txt
directory=$build/e2e-clients

fail() {
  echo "e2e-clients: $*" >&2
  exit 1
}

[ -x "$binary" ] || fail "there is no program at $binary: build it, or set CIRANDA_BINARY"
command -v curl >/dev/null 2>&1 || fail "curl is not installed"

interpreter=${CLIENTS_PYTHON:-}
if [ -z "$interpreter" ]; then
  for candidate in python3.13 python3.12 python3.11 python3.10 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      interpreter=$candidate
      break
    fi
  done
fi
[ -n "$interpreter" ] || fail "no Python from 3.10 with the venv module was found; set CLIENTS_PYTHON"

python=$directory/venv/bin/python
if ! cmp -s "$requirements" "$directory/installed" || ! "$python" -c '' 2>/dev/null; then
  echo "e2e-clients: installing the clients in $directory/venv" >&2
  rm -rf "$directory"
  mkdir -p "$directory"
  "$interpreter" -m venv "$directory/venv"
  "$python" -m pip install --quiet --disable-pip-version-check --retries 2 -r "$requirements" ||
    fail "the clients could not be installed from PyPI (see above); this walk cannot be made without them"
  cp "$requirements" "$directory/installed"
fi

PYTHONDONTWRITEBYTECODE=1 exec "$python" "$root/tests/e2e/clients/run.py" --binary "$binary" "$@"
