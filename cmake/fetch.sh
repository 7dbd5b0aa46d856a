# Sourced by what fetches from the network: mirrors and registries are away for a minute now and then.
# shellcheck shell=sh

# fetch WHAT COMMAND...: up to four tries of a command, with pauses of 5, 15 and 45 seconds (FETCH_PAUSES: others).
# The status is the last one's; what failed, and how often, is said on standard error.
fetch() {
  fetch_what=$1 fetch_try=1
  shift
  for fetch_pause in ${FETCH_PAUSES-5 15 45} end; do
    fetch_status=0
    "$@" || fetch_status=$?
    [ "$fetch_status" -ne 0 ] || return 0
    [ "$fetch_pause" != end ] || break
    echo "fetching $fetch_what failed (exit status $fetch_status): again in $fetch_pause s" >&2
    sleep "$fetch_pause"
    fetch_try=$((fetch_try + 1))
  done
  echo "fetching $fetch_what failed $fetch_try times: $*" >&2
  return "$fetch_status"
}
