--- The body of a job's start-up script: the same for every job. job_script.lua puts the job's values before it.
--
-- What holds at three in the morning, and why it is so:
-- * It is run at every boot, on machines that are rebooted, reset, or new. What is to be run is read from the bucket
--   each time (the generation), and so is whether this worker has finished it: a new machine's disk knows nothing.
-- * An exit status is not the end of a job when the platform ended it: a save on a maintenance notice exits with 0. So
--   notices are watched, told to the other workers through the bucket, and the job goes on when they are over.
-- * One worker's failure ends the others, with time to save; the first one's is kept as the cause.
-- * A call that failed says nothing: what is not known is asked again before anything follows from it.
return [=[
set -u
umask 022
base=/
[ -w / ] || base=$PWD/
directory=$base$RUN
state=${HOME:-/root}/.ciranda/$RUN
mkdir -p "$directory" "$state" || exit 1
boot_log=$state/boot-log
log=$boot_log
objects=${STORAGE}storage/v1/b/$BUCKET/o
server=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance

now() {
  date -u +%Y-%m-%dT%H:%M:%SZ
}

say() {
  printf '%s %s\n' "$(now)" "$*" | tee -a "$log"
}

metadata() {
  curl -sSf --retry 3 --max-time 30 -H 'Metadata-Flavor: Google' "$server/$1"
}

# Runs its arguments until they succeed: for at most $1 seconds, with growing pauses. Within what it runs it needs a
# subshell.
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

call() {
  curl -sSf --connect-timeout 30 --speed-limit 1 --speed-time 60 --max-time 3600 "$@"
}

# curl with our token, which is given on standard input and so not in the list of processes.
google() {
  token=$(metadata service-accounts/default/token 2>/dev/null |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
  if [ -n "$token" ]; then
    printf 'header = "Authorization: Bearer %s"\n' "$token" | call -K - "$@"
  else
    call "$@"
  fi
}

escaped() {
  printf '%s' "$1" | sed 's,/,%2F,g'
}

object() {
  printf '%s/%s' "$objects" "$(escaped "$PREFIX/$1")"
}

# read_object NAME FILE: its bytes, none when there is no such object; it fails when neither is known.
read_object() {
  : > "$2.part"
  code=$(google -o "$2.part" -w '%{http_code}' "$(object "$1")?alt=media" 2>/dev/null) || {
    [ "$code" = 404 ] || return 1
    : > "$2.part"
  }
  mv -f "$2.part" "$2"
}

fetch() {
  [ -e "$2" ] && [ "$(sha256sum < "$2" | cut -c1-64)" = "$3" ] && return 0
  google -o "$2.part" "$(object "$1")?alt=media" &&
    [ "$(sha256sum < "$2.part" | cut -c1-64)" = "$3" ] && mv -f "$2.part" "$2"
}

store() {
  put "$@" > /dev/null
}

# put FILE NAME [CONDITION]: the answer's status is on standard output.
put() {
  google -o /dev/null -w '%{http_code}' -X POST -H 'Content-Type: text/plain' -T "$1" \
    "${STORAGE}upload/storage/v1/b/$BUCKET/o?uploadType=media&name=$(escaped "$PREFIX/$2")${3:-}"
}

# The names and generations of the objects that begin so; it fails when they cannot be listed.
list_objects() {
  page=
  query="prefix=$(escaped "$PREFIX/$1")&fields=items(name,generation),nextPageToken"
  : > "$state/list"
  while :; do
    google "$objects?$query${page:+&pageToken=$page}" > "$state/page" || return 1
    tr ',{}' '\n\n\n' < "$state/page" | grep -E '"(name|generation)"' >> "$state/list"
    page=$(sed -n 's/.*"nextPageToken" *: *"\([^"]*\)".*/\1/p' "$state/page")
    [ -n "$page" ] || return 0
  done
}

# The log goes to the bucket whenever it has grown, and so does the stage when it could not before.
upload_log() {
  if [ -e "$state/stage" ]; then
    upload_stage
  fi
  size=$(wc -c < "$log")
  [ "$size" != "${uploaded:-}" ] || return 0
  store "$log" "$log_object" && uploaded=$size
}

upload_all() {
  upload_log && [ ! -e "$state/stage" ]
}

upload_stage() {
  store "$state/stage" "$stage_object" && rm -f "$state/stage"
}

# Where this worker is: in the guest attributes, which need no bucket, and in the bucket once its number is known.
stage() {
  curl -sSf --max-time 10 -o /dev/null -X PUT -H 'Metadata-Flavor: Google' --data-binary "$RUN $1" \
    "$server/guest-attributes/ciranda/stage" 2>/dev/null
  [ -n "${place:-}" ] || return 0
  printf '{"stage":"%s","generation":%s,"attempt":%s,"time":"%s"}\n' "$1" "${GENERATION:-0}" \
    "${attempt_number:-0}" "$(now)" > "$state/stage"
  upload_stage
}

# The last word of a worker that cannot go on, and cannot say who it is either.
give_up() {
  say "$1"
  stage failed
  persist 60 store "$log" "startup_log_$(hostname)"
  exit 1
}

env_value() {
  sed -n "s/^$1: '\(.*\)'\$/\1/p" "$state/tpu-env"
}

read_identity() {
  metadata attributes/tpu-env > "$state/tpu-env.part" && mv -f "$state/tpu-env.part" "$state/tpu-env"
}

stage identity
persist 1800 read_identity ||
  give_up "the metadata server does not say which worker this is; nothing was run"
SLICE_ID=$(env_value MEGASCALE_SLICE_ID)
SLICE_ID=${SLICE_ID:-0}
WORKER_ID=$(env_value WORKER_ID)
NODE_ID=$(env_value NODE_ID)
place="slice $SLICE_ID worker $WORKER_ID"
suffix=slice_${SLICE_ID}_worker_$WORKER_ID
log_object=main_command_log_$suffix
status_object=status_$suffix
stage_object=stage_$suffix
interruption_object=interruption_$suffix

# A new machine goes on with the log and the count of attempts that the one before it has left in the bucket.
read_before() {
  read_object "$stage_object" "$state/stage-before" && read_object "$log_object" "$state/log"
}

if [ ! -e "$state/log" ]; then
  persist 3600 read_before ||
    give_up "gs://$BUCKET/$PREFIX/ cannot be read; may the service account do so? Nothing was run"
fi
log=$state/log
cat "$boot_log" >> "$log" 2>/dev/null
rm -f "$boot_log"

# How often COMMAND was started here, and in which generation, by this machine or the one before it: each stage that is
# told until it is started again keeps the count, for a machine that is lost meanwhile.
read_count() {
  from=$state/stage-before
  [ ! -e "$state/counted" ] || from=$state/counted
  counted_generation=$(sed -n 's/.*"generation":\([0-9]*\).*/\1/p' "$from" 2>/dev/null)
  attempt_number=$(sed -n 's/.*"attempt":\([0-9]*\).*/\1/p' "$from" 2>/dev/null)
  GENERATION=$counted_generation
}
read_count

# What is to be run now: NAME=VALUE lines, of which only harmless characters are taken.
read_generation() {
  read_object generation "$state/generation" || return 1
  for name in GENERATION BUNDLE BUNDLE_SHA256 COMMAND_SHA256 GUARD GUARD_SHA256; do
    value=$(sed -n "s/^$name=\([A-Za-z0-9._-]*\)\$/\1/p" "$state/generation")
    [ -n "$value" ] || return 1
    eval "$name=\$value"
  done
}

fetch_job() {
  read_generation && fetch "command-$COMMAND_SHA256" "$state/command" "$COMMAND_SHA256" &&
    fetch "$GUARD" "$state/$GUARD" "$GUARD_SHA256" && {
    [ -e "$state/bundle-$BUNDLE_SHA256" ] || fetch "$BUNDLE" "$state/bundle.tar.gz" "$BUNDLE_SHA256"
  }
}

finished_here() {
  [ -e "$state/finished-$GENERATION" ] || grep -q "\"generation\":$GENERATION," "$state/status"
}

# Only the first worker's is taken.
tell_failure() {
  code=$(put "$state/failed" "failed-$GENERATION" '&ifGenerationMatch=0' 2>/dev/null) || [ "$code" = 412 ]
}

# What this worker has come to is on its disk first: a boot before the bucket knows it does not run COMMAND again.
finish() {
  printf '{"generation":%s,"status":%s,"attempt":%s,"time":"%s"}\n' "$GENERATION" "$1" "${attempt_number:-0}" \
    "$(now)" > "$state/status"
  printf 'multihost_job finished main command on %s at %s UTC with exit status %s.\n' "$place" \
    "$(date -u '+%Y-%m-%d %H:%M:%S')" "$1" | tee -a "$log"
  rm -f "$state/failed"
  if [ "$1" != 0 ]; then
    printf '{"slice":%s,"worker":%s,"status":%s,"time":"%s"}\n' "$SLICE_ID" "$WORKER_ID" "$1" "$(now)" \
      > "$state/failed"
  fi
  : > "$state/finished-$GENERATION"
}

all_finished() {
  list_objects "finished-${GENERATION}_" && [ "$(grep -c '"name"' "$state/list")" -ge "$NUM_WORKERS" ]
}

delete_queued_resource() {
  google -o /dev/null -X DELETE \
    "${TPU}$VERSION/projects/$PROJECT/locations/$ZONE/queuedResources/$QUEUED_RESOURCE?force=true"
}

# The bucket is told, and when everybody has finished the queued resource goes: by the first worker of slice 0, and by
# those of the other slices when it is still there after a while. `ciranda gc` does when none of them can.
see_off() {
  if [ -e "$state/failed" ]; then
    persist 3600 tell_failure
  fi
  persist 3600 upload_log
  persist 3600 store "$state/status" "$status_object"
  persist 3600 store "$state/status" "finished-${GENERATION}_$suffix"
  stage finished
  [ "$WORKER_ID" = 0 ] || exit 0
  persist 604800 all_finished
  [ "$SLICE_ID" = 0 ] || sleep 120
  if persist 3600 read_object generation "$state/generation" && [ -s "$state/generation" ] &&
    ! grep -qx "GENERATION=$GENERATION" "$state/generation"; then
    say "another generation of this job is there: the queued resource stays, and a reset takes it up"
    persist 600 upload_log
    exit 0
  fi
  persist 3600 delete_queued_resource || {
    say "the queued resource $QUEUED_RESOURCE was not deleted"
    upload_log
  }
  exit 0
}

# A boot cuts off what copies the attempt's log into ours: what came last is brought over from the attempt itself.
mend_log() {
  if [ -e "$1/base" ] && [ -e "$1/log" ] && [ ! -e "$1/followed" ]; then
    { head -c "$(cat "$1/base")" "$log" && cat "$1/log"; } > "$log.part" && mv -f "$log.part" "$log"
    : > "$1/followed"
  fi
}

# The other workers that have finished this generation: at least so many.
others_finished() {
  list_objects "finished-${GENERATION}_" && [ "$(grep -c '"name"' "$state/list")" -ge "$1" ]
}

# A boot between COMMAND's own end and our record of it: another start would do its work twice, or wait for peers that
# do not come. That it was COMMAND's own is known when nobody asked it to end, no notice was there, and a peer has
# finished, which may still be looking for notices itself. A lone worker starts again: to take a save upon a notice that
# was not seen for the end of the job would be worse. It sets status.
ended_before_boot() {
  last=$state/attempt-$GENERATION-$(cat "$attempts" 2>/dev/null)
  [ -e "$last/exit" ] && [ ! -e "$last/interrupted" ] && [ ! -s "$state/notice" ] || return 1
  status=$(sed -n 's/^{"version":[0-9]*,"status":\([0-9]*\),.*"stopped":false,.*/\1/p' "$last/exit")
  [ -n "$status" ] || return 1
  [ "$NUM_WORKERS" -gt 1 ] && persist $((SETTLE * 4)) others_finished 1
}

# A new machine in the place of one that ran COMMAND, when all others have finished: how it ended here is on a disk that
# is gone, and there is nobody left to run it with.
left_alone() {
  [ ! -e "$attempts" ] && [ "$NUM_WORKERS" -gt 1 ] &&
    grep -q "\"stage\":\"running\",\"generation\":$GENERATION," "$state/stage-before" 2>/dev/null &&
    persist 300 others_finished 0 && others_finished $((NUM_WORKERS - 1))
}

stage fetch
persist 3600 fetch_job || {
  say "gs://$BUCKET/$PREFIX/ has no job that can be fetched; may the service account read it?"
  GENERATION=${GENERATION:-0}
  upload_log
  stage failed
  exit 1
}
[ "$GENERATION" = "$counted_generation" ] || attempt_number=0
if [ ! -e "$state/finished-$GENERATION" ]; then
  persist 3600 read_object "$status_object" "$state/status" ||
    give_up "gs://$BUCKET/$PREFIX/$status_object cannot be read; nothing was run"
fi
if finished_here; then
  say "$place has finished generation $GENERATION; it is not run again"
  see_off
fi
attempts=$state/attempts-$GENERATION
if ended_before_boot; then
  attempt_number=$(cat "$attempts")
  mend_log "$state/attempt-$GENERATION-$attempt_number"
  say "attempt $attempt_number had ended with exit status $status before this boot, and so has the job: not run again"
  finish "$status"
  see_off
elif left_alone; then
  say "all other workers have finished, and how COMMAND ended on $place was on the machine before this one:" \
    "status unknown; it is not run alone"
  finish 1
  see_off
fi
if [ ! -e "$state/bundle-$BUNDLE_SHA256" ]; then
  if ! tar -xzpf "$state/bundle.tar.gz" --no-same-owner -C "$directory"; then
    say "the bundle cannot be unpacked in $directory"
    finish 1
    see_off
  fi
  rm -f "$state/bundle.tar.gz"
  : > "$state/bundle-$BUNDLE_SHA256"
  say "unpacked $BUNDLE in $directory"
fi
guard=$state/$GUARD
chmod 755 "$guard"

limit=$(ulimit -Hn)
ulimit -n 100000 2>/dev/null || ulimit -n "$limit" 2>/dev/null
stage environment
venv=$state/venv
if [ ! -e "$venv/bin/activate" ] && ! python3 -m venv "$venv" >> "$log" 2>&1; then
  rm -rf "$venv"
  say "no virtual environment could be made (python3 -m venv); going on without one"
fi

# What the platform says of this machine; nothing when it does not answer for a minute.
event() {
  persist 60 metadata "$1" 2>/dev/null || :
}

# Keeps a value of the metadata server and shows it to the other workers, when it is a notice.
noticed() {
  case $2 in
  '' | FALSE | NONE) return 1 ;;
  esac
  printf '{"notice":"%s","value":"%s","time":"%s"}\n' "$1" "$2" "$(now)" > "$state/notice"
  persist 60 store "$state/notice" "$interruption_object"
}

# Stays with one value of the metadata server until it becomes a notice. What it was before COMMAND began, $2, is no
# news: an event may still be shown after the reboot that it was about.
watch_notice() {
  seen=$2 query=
  while :; do
    value=$(curl -sf --max-time 40 -H 'Metadata-Flavor: Google' "$server/$1$query") || {
      sleep 5
      continue
    }
    query='?wait_for_change=true&timeout_sec=20'
    if [ "$value" != "$seen" ] && noticed "$1" "$value"; then
      return
    fi
    seen=$value
  done
}

# The nodes of the zone; none when the service account may not see them.
list_nodes() {
  query="pageSize=1000&fields=nodes(name,state,health),nextPageToken"
  code=$(google -o "$state/nodes" -w '%{http_code}' \
    "${TPU}$VERSION/projects/$PROJECT/locations/$ZONE/nodes?$query" 2>/dev/null) || {
    [ "$code" = 403 ] && : > "$state/nodes"
  }
}

# Are the nodes all there? Asked after a failure: when a slice is broken its peers fail too, and it is nobody's fault.
# It succeeds when it is known that they are not.
nodes_broken() {
  (persist 60 list_nodes) && [ -s "$state/nodes" ] || return 1
  # One page is all that is asked for: of a zone with more nodes nothing is known.
  if grep -q '"nextPageToken"' "$state/nodes"; then
    return 1
  fi
  nodes=$NODE_ID
  [ "$NUM_SLICES" = 1 ] || nodes="${NODE_ID%-"$SLICE_ID"}-[0-9]*"
  ready=$(tr -d ' \n' < "$state/nodes" | tr '}' '\n' | grep "/nodes/$nodes\"" | grep '"state":"READY"' |
    grep -vc '"health":"UNHEALTHY')
  [ "$ready" -lt "$NUM_SLICES" ]
}

# Was it the platform that ended COMMAND, here or at another worker? A notice that is shown now may have come before
# COMMAND began, or when nobody looked, unless it was waited for in vain; the others' have a moment to arrive.
interrupted() {
  if [ -s "$state/notice" ]; then
    persist 60 store "$state/notice" "$interruption_object"
    return 0
  fi
  for kind in preempted maintenance-event; do
    value=$(event "$kind")
    [ "$value" = "${outlived:-}" ] || noticed "$kind" "$value"
    [ ! -s "$state/notice" ] || return 0
  done
  sleep "$SETTLE"
  if persist 300 list_objects interruption_ && [ -s "$state/list" ] &&
    [ "$(cksum < "$state/list")" != "$interruptions" ]; then
    return 0
  fi
  [ "$1" != 0 ] || return 1
  for _ in 1 2 3; do
    nodes_broken && return 0
    sleep "$SETTLE"
  done
  return 1
}

# A machine that is preempted does not come back from it.
notices_over() {
  [ "$(event preempted)" != TRUE ] || return 1
  case $(event maintenance-event) in
  NONE) google -o /dev/null -X DELETE "$(object "$interruption_object")" 2>/dev/null ;;
  esac
  list_objects interruption_ && [ ! -s "$state/list" ] && ! nodes_broken
}

somebody_failed() {
  read_object "failed-$GENERATION" "$state/first-failure" && grep -q '"status"' "$state/first-failure"
}

run_attempt() {
  [ -e "$attempts" ] || echo "${attempt_number:-0}" > "$attempts"
  mend_log "$state/attempt-$GENERATION-$(cat "$attempts")"
  attempt_number=$(($(cat "$attempts") + 1))
  echo "$attempt_number" > "$attempts"
  printf '{"generation":%s,"attempt":%s}\n' "$GENERATION" "$attempt_number" > "$state/counted"
  say "multihost_job attempt $attempt_number on $place, node $NODE_ID, generation $GENERATION," \
    "boot $(cat /proc/sys/kernel/random/boot_id), ulimit -n $(ulimit -n)"
  rm -f "$state/notice"
  interruptions=
  persist 300 list_objects interruption_ && interruptions=$(cksum < "$state/list")
  attempt=$state/attempt-$GENERATION-$attempt_number
  mkdir -p "$attempt"
  cp "$state/command" "$attempt/command"
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
      printf 'VIRTUAL_ENV=%s\0PATH=%s/bin:%s\0' "$venv" "$venv" "$PATH"
    fi
  } > "$attempt/environment"
  # A machine that is lost at any time from now on has left its number, and the end of the attempt before.
  stage running
  persist 60 upload_all
  wc -c < "$log" > "$attempt/base"
  preempted=$(event preempted) maintenance=$(event maintenance-event)
  # shellcheck disable=SC2086  # CIRANDA_GUARD_OPTIONS is several words
  if ! "$guard" run "$attempt" ${CIRANDA_GUARD_OPTIONS:-} >> "$state/guard.log" 2>&1; then
    say "the guard did not start the command: $(tail -n 1 "$state/guard.log")"
    status=1
    return
  fi
  watch_notice preempted "$preempted" &
  watchers=$!
  watch_notice maintenance-event "$maintenance" &
  watchers="$watchers $!"
  trap 'upload_log; exit 143' TERM
  "$guard" follow "$attempt" --from 0 >> "$log" 2>> "$state/guard.log" &
  follower=$!
  stopping= tick=0 next_upload=$UPLOAD_EVERY
  while kill -0 "$follower" 2>/dev/null; do
    sleep 1
    tick=$((tick + 1))
    if [ "$tick" -ge "$next_upload" ]; then
      upload_log
      # The whole log goes up each time: the longer it is the less often.
      next_upload=$((tick + UPLOAD_EVERY + size / 1048576))
    fi
    if [ $((tick % PEERS_EVERY)) = 0 ] && [ -z "$stopping" ] && somebody_failed; then
      say "another worker has failed: stopping, with $GRACE s to save"
      stopping=yes
      "$guard" stop "$attempt" --grace "$GRACE" --reason 'another worker has failed' >> "$state/guard.log" 2>&1 &
    fi
  done
  : > "$attempt/followed"
  # shellcheck disable=SC2086  # several pids
  kill $watchers 2>/dev/null
  trap - TERM
  status=$(sed -n 's/^{"version":[0-9]*,"status":\([0-9]*\),.*/\1/p' "$attempt/exit" 2>/dev/null)
  status=${status:-1}
}

# Whoever is back first after a reboot waits for the others' notices to be over.
if persist 300 list_objects interruption_ && [ -s "$state/list" ]; then
  persist 600 notices_over
fi
while :; do
  run_attempt
  if [ -n "${stopping:-}" ] || ! interrupted "$status"; then
    break
  fi
  : > "$attempt/interrupted"
  say "attempt $attempt_number ended with exit status $status upon the platform's doing: it goes on when that is over"
  stage interrupted
  persist 60 upload_log
  # A reboot, or the loss of the machine, is what usually ends this wait.
  persist 7200 notices_over || {
    say "nothing has come of the platform's notice in two hours: going on"
    outlived=$(event maintenance-event)
  }
done
finish "$status"
see_off
]=]
