#!/bin/sh
# Faults of SSH servers that OpenSSH does not show: a scripted server on npm's ssh2 plays them, one user name a fault.
# Each must end in a named error, in time, and each has a control.
#
# Environment: CIRANDA_BINARY, CIRANDA_BUILD (ssh2 is installed into it once, without its native parts).
# Without node and npm the walk says so and does nothing.
set -eu
cd "$(dirname "$0")/../.."
binary=${CIRANDA_BINARY:-$PWD/build/ciranda}
build=${CIRANDA_BUILD:-$PWD/build}
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
  echo '{"e2e": "ssh", "skipped": "node and npm are not installed"}'
  exit 0
fi
server=$build/ssh-faults
if [ ! -d "$server/node_modules/ssh2" ]; then
  mkdir -p "$server"
  cp tests/fixtures/ssh_faults/package.json "$server/"
  (cd "$server" && npm install --ignore-scripts --no-audit --no-fund --silent >/dev/null)
fi
cp tests/fixtures/ssh_faults/server.js "$server/"
exec env -u SSH_AUTH_SOCK "$binary" tests/e2e/ssh/faults.lua "$server"
