# Sourced by mesh.sh and by tests/bench/mesh.sh: sets $python (with jax installed) and $lua.
# Needs $root and $build; see mesh.sh for the variables it reads.
# shellcheck shell=sh disable=SC2034

lua=${MESH_LUA:-}
if [ -z "$lua" ]; then
  for candidate in lua5.4 lua; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -e 'os.exit(_VERSION == "Lua 5.4")' 2>/dev/null; then
      lua=$candidate
      break
    fi
  done
fi
[ -n "$lua" ] || { echo "no Lua 5.4 interpreter found; set MESH_LUA" >&2; exit 1; }

interpreter=${MESH_PYTHON:-}
if [ -z "$interpreter" ]; then
  for candidate in python3.14 python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import venv' 2>/dev/null; then
      interpreter=$candidate
      break
    fi
  done
fi
[ -n "$interpreter" ] || { echo "no Python with the venv module found; set MESH_PYTHON" >&2; exit 1; }

version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv="$build/venv-mesh-$version-${MESH_JAX:-newest}"
python="$venv/bin/python"
if ! "$python" -c 'import jax' 2>/dev/null; then
  echo "installing jax ${MESH_JAX:-(newest)} for Python $version in $venv" >&2
  rm -rf "$venv"
  "$interpreter" -m venv "$venv"
  . "$root/cmake/fetch.sh"
  fetch "jax from PyPI" \
    "$python" -m pip install --quiet --disable-pip-version-check "jax${MESH_JAX:+==$MESH_JAX}"
fi
