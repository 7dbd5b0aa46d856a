#!/bin/sh
# What MaxText's multihost_runner.py does, step by step, with OpenSSH in place of gcloud: an archive, one scp a host, then
# one ssh a host that makes the directory, moves the archive there, unpacks it, writes and runs a script that ends who
# holds the accelerator, and runs the command. It waits for its processes where the Python script looks once a second.
#
#   peer.sh RUN SOURCE LOGS HOSTS COMMAND   HOSTS: a file of lines "ADDRESS NAME-OF-THE-LOG"; SSH_OPTIONS: of both
set -eu
run=$1 source=$2 logs=$3 hosts=$4 command=$5
archive=script_dir_zip_$run.tar.gz

# Waits for the processes of $pids; the first that failed ends the run.
wait_for_all() {
  for pid in $pids; do
    wait "$pid" || { echo "$1 failed" >&2; exit 1; }
  done
}

mkdir -p "$logs"
tar --exclude=tmp -czf "$logs/$archive" -C "$source" ./

pids=
while read -r address name; do
  # shellcheck disable=SC2086 # a list of options
  scp -q $SSH_OPTIONS "$logs/$archive" "$address:" </dev/null &
  pids="$pids $!"
done <"$hosts"
wait_for_all scp

kill_script='#!/bin/bash
device=accel0
case $1 in v5*|v6*) device=vfio/0 ;; esac
for pid in $(lsof -w -t /dev/$device); do
  kill -9 "$pid"
  while kill -0 "$pid" 2>/dev/null; do sleep 1; done
done
rm -f /tmp/libtpu_lockfile'
remote="mkdir -p $run && mv $archive $run && cd $run && tar xzf $archive \
&& echo '$kill_script' > kill_existing_processes.sh && bash kill_existing_processes.sh v5litepod-16 && $command"

pids=
while read -r address name; do
  # shellcheck disable=SC2086
  ssh $SSH_OPTIONS "$address" "$remote" >"$logs/$name" 2>&1 </dev/null &
  pids="$pids $!"
done <"$hosts"
wait_for_all ssh
