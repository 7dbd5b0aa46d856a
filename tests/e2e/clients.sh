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

name=e2e-clients
. "$(dirname -- "$0")/clients/environment.sh"
command -v curl >/dev/null 2>&1 || fail "curl is not installed"

PYTHONDONTWRITEBYTECODE=1 exec "$python" "$root/tests/e2e/clients/run.py" --binary "$binary" "$@"
