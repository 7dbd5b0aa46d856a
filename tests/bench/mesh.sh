#!/bin/sh
# Places 65,536 devices (256 slices of 256 chips) with jax's own function and with ciranda.mesh, in one run, and
# plans them exhaustively. Prints one line of JSON; mesh/lua_side.lua says what its keys mean. The status is 0 when
# both gave every device the same place, whatever the times.
#
#     tests/bench/mesh.sh [REPEATS]
#
# REPEATS is 9 when absent. The environment is that of tests/e2e/mesh.sh.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
build=${CIRANDA_BUILD:-$root/build}
repeats=${1:-9}
. "$root/tests/e2e/mesh/environment.sh"

work="$build/bench-mesh-$$"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
"$python" "$root/tests/bench/mesh/jax_side.py" "$repeats" "$work/ids" >"$work/times"
LUA_PATH="$root/lua/?.lua;$root/lua/?/init.lua" "$lua" "$root/tests/bench/mesh/lua_side.lua" "$repeats" "$work/ids" "$work/times"
