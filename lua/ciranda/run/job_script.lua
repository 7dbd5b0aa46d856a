--- The start-up script of a job: what a worker runs at every boot, with nobody watching.
--
-- It needs a POSIX sh, curl, tar and, for the virtual environment, python3. It is run again after every reboot and on
-- every re-created machine; a job that has finished on a machine is not run there again. Its values come first, as
-- assignments; the rest is the same for every job.
local err = require("ciranda.io.error")

local M = {}

local BODY = [=[
set -u
umask 022
base=/
[ -w / ] || base=$PWD/
directory=$base$RUN
state=${HOME:-/root}/.ciranda/$RUN
mkdir -p "$directory" "$state" || exit 1
log=$state/log

say() {
  printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*" | tee -a "$log"
}

metadata() {
  curl -sSf --retry 3 --max-time 30 -H 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}

# Runs its arguments until they succeed: for at most $1 seconds, with growing pauses.
persist() {
  limit=$(($(date +%s) + $1)) pause=1
  shift
  until "$@"; do
    if [ "$(date +%s)" -ge "$limit" ]; then
      return 1
    fi
    sleep "$pause"
    pause=$((pause < 30 ? pause * 2 : 30))
  done
}

# curl with our token, which is given on standard input and so not in the list of processes.
google() {
  token=$(metadata service-accounts/default/token 2>/dev/null |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
  if [ -n "$token" ]; then
    printf 'header = "Authorization: Bearer %s"\n' "$token" | curl -sSf --max-time 3600 -K - "$@"
  else
    curl -sSf --max-time 3600 "$@"
  fi
}

encoded() {
  printf '%s' "$1" | sed 's,/,%2F,g'
}

fetch() {
  google -o "$2.part" "${STORAGE}storage/v1/b/$BUCKET/o/$(encoded "$PREFIX/$1")?alt=media" &&
    [ "$(sha256sum < "$2.part" | cut -c1-64)" = "$3" ] && mv -f "$2.part" "$2"
}

store() {
  google -o /dev/null -X POST -H 'Content-Type: text/plain' -T "$1" \
    "${STORAGE}upload/storage/v1/b/$BUCKET/o?uploadType=media&name=$(encoded "$PREFIX/$2")"
}

# The log goes to the bucket whenever it has grown.
upload_log() {
  size=$(wc -c < "$log")
  if [ "$size" != "${uploaded:-}" ] && store "$log" "$log_object"; then
    uploaded=$size
  fi
}

env_value() {
  sed -n "s/^$1: '\(.*\)'\$/\1/p" "$state/tpu-env"
}

read_identity() {
  metadata attributes/tpu-env > "$state/tpu-env.part" && mv -f "$state/tpu-env.part" "$state/tpu-env"
}

if ! persist 1800 read_identity; then
  say "the metadata server does not say which worker this is; nothing was run"
  exit 1
fi
SLICE_ID=$(env_value MEGASCALE_SLICE_ID)
SLICE_ID=${SLICE_ID:-0}
WORKER_ID=$(env_value WORKER_ID)
NODE_ID=$(env_value NODE_ID)
place="slice $SLICE_ID worker $WORKER_ID"
log_object=main_command_log_slice_${SLICE_ID}_worker_$WORKER_ID
status_object=status_slice_${SLICE_ID}_worker_$WORKER_ID

if [ -e "$state/finished" ]; then
  upload_log
  exit 0
fi

attempt_number=$(($(cat "$state/attempts" 2>/dev/null || echo 0) + 1))
echo "$attempt_number" > "$state/attempts"
limit=$(ulimit -Hn)
ulimit -n 100000 2>/dev/null || ulimit -n "$limit" 2>/dev/null
say "multihost_job attempt $attempt_number on $place, node $NODE_ID, boot $(cat /proc/sys/kernel/random/boot_id)," \
  "ulimit -n $(ulimit -n)"
upload_log

finish() {
  printf '{"status":%s,"attempt":%s,"time":"%s"}\n' "$1" "$attempt_number" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
    > "$state/status"
  printf 'multihost_job finished main command on %s at %s UTC with exit status %s.\n' "$place" \
    "$(date -u '+%Y-%m-%d %H:%M:%S')" "$1" | tee -a "$log"
  : > "$state/finished"
  persist 3600 upload_log
  persist 3600 store "$state/status" "$status_object"
}

if [ ! -e "$state/bundle-$BUNDLE_SHA256" ]; then
  if ! persist 3600 fetch "$BUNDLE" "$state/bundle.tar.gz" "$BUNDLE_SHA256"; then
    say "gs://$BUCKET/$PREFIX/$BUNDLE could not be fetched; may the service account read it?"
    finish 1
    exit 1
  fi
  if ! tar -xzpf "$state/bundle.tar.gz" --no-same-owner -C "$directory"; then
    say "the bundle cannot be unpacked in $directory"
    finish 1
    exit 1
  fi
  rm -f "$state/bundle.tar.gz"
  : > "$state/bundle-$BUNDLE_SHA256"
  say "unpacked $BUNDLE in $directory"
fi

guard=$state/$GUARD
if [ ! -x "$guard" ]; then
  if ! persist 3600 fetch "$GUARD" "$guard" "$GUARD_SHA256"; then
    say "gs://$BUCKET/$PREFIX/$GUARD could not be fetched"
    finish 1
    exit 1
  fi
  chmod 755 "$guard"
fi

path=$PATH
venv=$state/venv
if [ ! -e "$venv/bin/activate" ] && ! python3 -m venv "$venv" >> "$log" 2>&1; then
  rm -rf "$venv"
  say "no virtual environment could be made (python3 -m venv); going on without one"
fi

attempt=$state/attempt-$attempt_number
mkdir -p "$attempt"
printf '%s\n' "$COMMAND" > "$attempt/command"
printf '%s\n' "$directory" > "$attempt/cwd"
[ -x /bin/bash ] && echo /bin/bash > "$attempt/shell"
{
  printf 'SLICE_ID=%s\0WORKER_ID=%s\0NODE_ID=%s\0ZONE=%s\0PROJECT=%s\0' \
    "$SLICE_ID" "$WORKER_ID" "$NODE_ID" "$ZONE" "$PROJECT"
  printf 'CIRANDA_RUN=%s\0CIRANDA_ATTEMPT=%s\0CIRANDA_SLICE_ID=%s\0CIRANDA_WORKER_ID=%s\0' \
    "$RUN" "$attempt_number" "$SLICE_ID" "$WORKER_ID"
  printf 'CIRANDA_NUM_SLICES=%s\0CIRANDA_NUM_WORKERS=%s\0CIRANDA_PROCESS_ID=%s\0' \
    "$NUM_SLICES" "$NUM_WORKERS" "$((SLICE_ID * NUM_WORKERS / NUM_SLICES + WORKER_ID))"
  if [ -d "$venv" ]; then
    printf 'VIRTUAL_ENV=%s\0PATH=%s/bin:%s\0' "$venv" "$venv" "$path"
  fi
} > "$attempt/environment"

# shellcheck disable=SC2086  # CIRANDA_GUARD_OPTIONS is several words
if ! "$guard" run "$attempt" ${CIRANDA_GUARD_OPTIONS:-} >> "$state/guard.log" 2>&1; then
  say "the guard did not start the command: $(tail -n 1 "$state/guard.log")"
  finish 1
  exit 1
fi
"$guard" follow "$attempt" --from 0 >> "$log" 2>> "$state/guard.log" &
follower=$!
while kill -0 "$follower" 2>/dev/null; do
  waited=0
  while [ "$waited" -lt "$UPLOAD_EVERY" ] && kill -0 "$follower" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
  done
  upload_log
done
status=$(sed -n 's/^{"version":[0-9]*,"status":\([0-9]*\),.*/\1/p' "$attempt/exit" 2>/dev/null)
finish "${status:-1}"

# The first worker sees the queued resource off when everybody has finished; `ciranda gc` does when it cannot.
if [ "$SLICE_ID" = 0 ] && [ "$WORKER_ID" = 0 ] && [ -n "$QUEUED_RESOURCE" ]; then
  all_finished() {
    count=0 page=
    while :; do
      google "${STORAGE}storage/v1/b/$BUCKET/o?prefix=$(encoded "$PREFIX/status_")${page:+&pageToken=$page}" \
        > "$state/finished-list" || return 1
      count=$((count + $(tr ',' '\n' < "$state/finished-list" | grep -c '"name"')))
      page=$(sed -n 's/.*"nextPageToken" *: *"\([^"]*\)".*/\1/p' "$state/finished-list")
      [ -n "$page" ] || break
    done
    [ "$count" -ge "$NUM_WORKERS" ]
  }
  delete() {
    google -o /dev/null -X DELETE \
      "${TPU}$VERSION/projects/$PROJECT/locations/$ZONE/queuedResources/$QUEUED_RESOURCE?force=true"
  }
  persist 604800 all_finished && persist 3600 delete || say "the queued resource $QUEUED_RESOURCE was not deleted"
fi
]=]

---@class ciranda.run.JobValues
---@field RUN string name of the run
---@field COMMAND string
---@field BUCKET string
---@field PREFIX string directory of the run's objects
---@field STORAGE string base of the Cloud Storage API, ending in "/"
---@field TPU string base of the TPU API, ending in "/"
---@field VERSION string of the TPU API
---@field BUNDLE string object name below PREFIX
---@field BUNDLE_SHA256 string
---@field GUARD string object name below PREFIX
---@field GUARD_SHA256 string
---@field PROJECT string
---@field ZONE string
---@field QUEUED_RESOURCE string "" when the first worker is not to delete it
---@field NUM_SLICES integer
---@field NUM_WORKERS integer
---@field UPLOAD_EVERY integer seconds between two looks at whether the log has grown

local NAMES = {
  "RUN",
  "COMMAND",
  "BUCKET",
  "PREFIX",
  "STORAGE",
  "TPU",
  "VERSION",
  "BUNDLE",
  "BUNDLE_SHA256",
  "GUARD",
  "GUARD_SHA256",
  "PROJECT",
  "ZONE",
  "QUEUED_RESOURCE",
  "NUM_SLICES",
  "NUM_WORKERS",
  "UPLOAD_EVERY",
}

--- The script for a job.
---@param values ciranda.run.JobValues
---@return string
function M.text(values)
  local lines = { "#!/bin/sh", "# Written by ciranda multihost_job. Run at every boot." }
  for _, name in ipairs(NAMES) do
    local value = values[name]
    if value == nil then
      err.misuse(2, "job_script.text: %s is missing", name)
    end
    lines[#lines + 1] = ("%s='%s'"):format(name, (tostring(value):gsub("'", "'\\''")))
  end
  return table.concat(lines, "\n") .. "\n" .. BODY
end

return M
