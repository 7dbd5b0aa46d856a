#!/bin/sh
# Walks random meshes through jax's own mesh_utils and through ciranda.mesh, and compares.
#
#     tests/e2e/mesh.sh [COUNT]
#
# COUNT is 2000 when absent, 200 with CIRANDA_SHORT. Environment:
#   CIRANDA_BUILD   directory for the Python environment and the cases (build, beside the sources)
#   MESH_SEED       repeats a walk; a new one each time when absent
#   MESH_JAX        the jax release to install and to follow; the newest that the Python found can run when absent
#   MESH_PYTHON     the Python to use; the newest installed when absent
#   MESH_LUA        the Lua 5.4 interpreter (lua5.4, then lua)
# jax comes from PyPI (CPU only) into a virtual environment that is kept for the next walk.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
build=${CIRANDA_BUILD:-$root/build}
count=${1:-${CIRANDA_SHORT:+200}}
count=${count:-2000}
seed=${MESH_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
. "$root/tests/e2e/mesh/environment.sh"

mkdir -p "$build/e2e-mesh"
cases="$build/e2e-mesh/cases-$$.lua"
trap 'rm -f "$cases" || :' EXIT
echo "seed $seed"
"$python" "$root/tests/e2e/mesh/walk.py" "$count" "$seed" "$cases"
LUA_PATH="$root/lua/?.lua;$root/lua/?/init.lua" "$lua" "$root/tests/e2e/mesh/walk.lua" "$cases"
