#!/bin/sh
# Private key files, mutated: the parser must refuse them with a reason, or make a key that signs, and never touch memory
# that is not its own. Ten minutes, or twenty seconds with CIRANDA_SHORT. libFuzzer where clang has it, else a mutator of
# our own; both with AddressSanitizer and UndefinedBehaviorSanitizer.
#
# Then known_hosts and ssh_config files made from a seed, compared with ssh-keygen -F and ssh -G (the specs do the same
# with a seed that does not change). FUZZ_SEED repeats a run.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
binary=${CIRANDA_BINARY:-$root/build/ciranda}
work=${CIRANDA_BUILD:-$root/build}/fuzz-ssh
seconds=600
[ -z "${CIRANDA_SHORT:-}" ] || seconds=20
seed=${FUZZ_SEED:-$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}
echo "seed $seed"
rm -rf "$work"
mkdir -p "$work/seeds" "$work/corpus" "$work/keys"

# Seeds: every type and format; the text of each file, and the content of OpenSSH's own without and with a passphrase.
n=0
for type in "ed25519" "rsa -b 1024" "ecdsa -b 256" "ecdsa -b 384" "ecdsa -b 521"; do
  for format in "-N ''" "-N '' -m PEM" "-N '' -m PKCS8" "-N passphrase -a 1 -Z aes256-ctr" \
    "-N passphrase -a 1 -Z aes256-gcm@openssh.com" "-N passphrase -a 1 -Z chacha20-poly1305@openssh.com"; do
    n=$((n + 1))
    key=$work/keys/$n
    eval "ssh-keygen -q -t $type $format -f '$key'"
    { printf '\001\000'; cat "$key"; } >"$work/seeds/text-$n"
    if grep -q OPENSSH "$key"; then
      { printf '\000\001'; grep -v -e '----' "$key" | base64 -d; } >"$work/seeds/bytes-$n"
    fi
  done
done

sources="$root/tests/fuzz/ssh/key.c $root/engine/ssh_key.c $root/engine/ssh_key_openssh.c $root/engine/ssh_bcrypt.c"
flags="-std=gnu11 -D_GNU_SOURCE -O1 -g -I$root/engine -fno-omit-frame-pointer"
cd "$work"
libfuzzer=no
for compiler in "${CLANG:-clang}" clang-19 clang-16 clang-15 clang-14; do
  # shellcheck disable=SC2086 # lists of words
  if command -v "$compiler" >/dev/null &&
    "$compiler" $flags -fsanitize=fuzzer,address,undefined $sources -o fuzz -lcrypto 2>build.log; then
    libfuzzer=yes
    break
  fi
done
if [ "$libfuzzer" = yes ]; then
  ./fuzz -max_total_time="$seconds" -seed="$seed" -max_len=8192 -timeout=60 -rss_limit_mb=1024 -verbosity=0 \
    -print_final_stats=1 corpus seeds >log 2>&1 || { tail -n 40 log; exit 1; }
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' log)
else
  # shellcheck disable=SC2086
  "${CC:-cc}" $flags -fsanitize=address,undefined -fno-sanitize-recover=undefined $sources \
    "$root/tests/fuzz/ssh/driver.c" -o fuzz -lcrypto
  runs=$(./fuzz "$seconds" "$seed" seeds/*) || { echo "the input is $work/fuzz-last"; exit 1; }
fi

cd "$root"
rounds=5
[ -z "${CIRANDA_SHORT:-}" ] || rounds=1
i=0
while [ "$i" -lt "$rounds" ]; do
  for name in known_hosts config; do
    CIRANDA_SEED=$((seed + i)) "$binary" test "tests/spec/ssh/${name}_spec.lua" >"$work/$name.log" 2>&1 ||
      { cat "$work/$name.log"; exit 1; }
  done
  i=$((i + 1))
done
printf '{"fuzz": "ssh", "seed": %s, "seconds": %s, "key_runs": %s, "file_rounds": %s, "libfuzzer": "%s"}\n' \
  "$seed" "$seconds" "${runs:-0}" "$rounds" "$libfuzzer"
