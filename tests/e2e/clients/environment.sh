# environment.sh - sourced, with $name: a virtual environment with the clients of requirements.txt, made when it is not
# there. Sets root, build, binary, directory and python; defines fail. CIRANDA_BUILD has the environment in e2e-clients.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
build=${CIRANDA_BUILD:-$root/build}
binary=${CIRANDA_BINARY:-$build/ciranda}
requirements=$root/tests/e2e/clients/requirements.txt
directory=$build/e2e-clients

fail() {
  echo "$name: $*" >&2
  exit 1
}

[ -x "$binary" ] || fail "there is no program at $binary: build it, or set CIRANDA_BINARY"

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
  echo "$name: installing the clients in $directory/venv" >&2
  rm -rf "$directory"
  mkdir -p "$directory"
  "$interpreter" -m venv "$directory/venv"
  . "$root/cmake/fetch.sh"
  fetch "the clients from PyPI" \
    "$python" -m pip install --quiet --disable-pip-version-check --retries 2 -r "$requirements" ||
    fail "the clients could not be installed from PyPI (see above); nothing can be shown without them"
  cp "$requirements" "$directory/installed"
fi
