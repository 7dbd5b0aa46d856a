#!/bin/sh
# `cmake --install` gives a working installation: the program runs from another directory, with no source tree in
# sight, and does the main job on the simulated cloud.
set -eu
cd "$(dirname "$0")/../.."
build=${CIRANDA_BUILD:-$PWD/build}
place=$(mktemp -d "${TMPDIR:-/tmp}/ciranda-install.XXXXXX")
trap 'rm -rf "$place" || :' EXIT
cmake --install "$build" --prefix "$place/prefix" >"$place/log" 2>&1 || {
  cat "$place/log"
  exit 1
}
mkdir "$place/home" "$place/tmp" "$place/work"
cd "$place/work"
status=0
env -i PATH="$place/prefix/bin:$PATH" HOME="$place/home" TMPDIR="$place/tmp" USER="$(id -un)" \
  ciranda run --sim multihost_runner --TPU_PREFIX=tpu --RUN_NAME=installed --COMMAND='echo "at $PWD"' \
  >"$place/out" 2>"$place/err" || status=$?
cat "$place/err"
cat "$place/out"
grep -q '/installed$' "$place/out" || status=1
modules=$(find "$place/prefix/share/ciranda" -name '*.lua' | wc -l)
pages=$(find "$place/prefix/share/doc" -name '*.md' | wc -l)
[ "$modules" -gt 0 ] && [ "$pages" -gt 0 ] || status=1
printf '{"e2e":"install","status":%d,"modules":%d,"pages":%d}\n' "$status" "$modules" "$pages"
exit "$status"
