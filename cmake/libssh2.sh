#!/bin/sh
# libssh2.sh PREFIX - a libssh2 that is new enough, when the system's is not.
#
# Ciranda needs libssh2 1.11: with 1.10 RSA keys cannot log in to today's servers, and signals cannot be sent. When
# pkg-config knows a version that is new enough, this does nothing. Otherwise it builds Debian 13's source package (the
# release with Debian's security patches) into PREFIX, as a static library, and leaves the system as it is:
#
# - apt runs with lists, caches and sources of its own inside PREFIX.work; nothing needs root. The address of the
#   archive and the key that signs it come from the machine's own apt configuration, which is only read.
# - the source is authentic because apt verifies the archive's signed index and the index holds the files' hashes.
# - PREFIX appears whole or not at all, and a second run finds it and says nothing.
#
# Exit status: 0 libssh2 is there, 1 it could not be built (the reason and the remedy are on standard error).

set -eu

need=1.11
suite=trixie
. "$(dirname "$0")/fetch.sh"

say() {
  printf 'libssh2: %s\n' "$*" >&2
}

fail() {
  say "$1"
  shift
  for line in "$@"; do
    printf '         %s\n' "$line" >&2
  done
  exit 1
}

case ${1-} in
/*) prefix=$1 ;;
'' | -*)
  printf 'usage: libssh2.sh PREFIX (the directory that libssh2 is installed into)\n' >&2
  exit 1
  ;;
*) prefix=$(pwd)/$1 ;;
esac

if pkg-config --atleast-version="$need" libssh2 2>/dev/null; then
  exit 0
fi
if [ -e "$prefix/lib/pkgconfig/libssh2.pc" ]; then
  exit 0
fi

missing=
for pair in apt-get:apt dpkg-source:dpkg-dev patch:patch make:make cc:gcc xz:xz-utils pkg-config:pkg-config; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
if ! pkg-config --exists openssl 2>/dev/null; then
  missing="$missing libssl-dev"
fi
if [ -n "$missing" ]; then
  fail "libssh2 $need or newer is needed; it can be built from Debian's source, but these packages are missing:" \
    "${missing# }" \
    "Install them, or install libssh2 $need with its headers so that pkg-config finds it."
fi

work=$prefix.work.$$
log=$work/log
mkdir -p "$work/apt/sources" "$work/apt/state/lists/partial" "$work/apt/cache/archives/partial" "$work/source" \
  "$work/stage"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# The machine's sources as lines "uri|suite|components|signed-by"; both formats of sources.list(5). A key block inside
# Signed-By stays in one field, its line ends written as \n.
read_sources() {
  eval "$(apt-config shell list Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
  for file in "$list" "$parts"/*.list; do
    [ -f "$file" ] && awk '
      { sub(/#.*/, "") }
      $1 == "deb" || $1 == "deb-src" {
        line = $0; sub(/^[ \t]*deb(-src)?[ \t]+/, "", line); key = ""
        if (line ~ /^\[/) {
          options = line; sub(/^\[/, "", options); sub(/\].*/, "", options); sub(/^[^]]*\][ \t]*/, "", line)
          n = split(options, option, /[ \t]+/)
          for (i = 1; i <= n; i++)
            if (tolower(option[i]) ~ /^signed-by\+?=/) { key = option[i]; sub(/^[^=]*=/, "", key) }
          gsub(/,/, " ", key)
        }
        n = split(line, field, /[ \t]+/); components = ""
        for (i = 3; i <= n; i++) components = components " " field[i]
        print field[1] "|" field[2] "|" components "|" key
      }' "$file"
  done
  for file in "$parts"/*.sources; do
    [ -f "$file" ] && awk '
      function flush(  i, j, n, m, uri, suite) {
        if (tolower(value["enabled"]) != "no" && value["types"] ~ /deb/) {
          n = split(value["uris"], uri, /[ \t]+/); m = split(value["suites"], suite, /[ \t]+/)
          for (i = 1; i <= n; i++) for (j = 1; j <= m; j++)
            if (uri[i] != "" && suite[j] != "")
              print uri[i] "|" suite[j] "|" value["components"] "|" value["signed-by"]
        }
        split("", value); name = ""
      }
      /^#/ { next }
      /^[ \t]*$/ { flush(); next }
      /^[ \t]/ {
        sub(/^[ \t]+/, ""); value[name] = value[name] (name == "signed-by" ? "\\n " : " ") $0; next
      }
      { name = tolower($0); sub(/[ \t]*:.*/, "", name); sub(/^[^:]*:[ \t]*/, ""); value[name] = $0 }
      END { flush() }' "$file"
  done
  return 0
}

# Write the source of suite $2 for the first of the machine's sources of suite $1; fails when there is none.
write_source() {
  line=$(read_sources | awk -F'|' -v suite="$1" '
    $2 == suite && (" " $3 " ") ~ / main / && $1 !~ /^cdrom:/ { print; exit }')
  [ -n "$line" ] || return 1
  uri=${line%%|*}
  key=${line##*|}
  {
    printf 'Types: deb-src\nURIs: %s\nSuites: %s\nComponents: main\n' "$uri" "$2"
    [ -z "$key" ] || printf "Signed-By: %b\n" "$key"
  } >"$work/apt/sources/$2.sources"
}

codename=$(. /etc/os-release 2>/dev/null && printf '%s' "${VERSION_CODENAME-}") || codename=
found=
for name in $codename stable oldstable "$suite"; do
  if write_source "$name" "$suite"; then
    found=$uri
    write_source "$name-security" "$suite-security" || true
    break
  fi
done
if [ -z "$found" ]; then
  fail "libssh2 $need or newer is needed, and this machine's apt configuration names no Debian archive to get it from." \
    "Install libssh2 $need with its headers so that pkg-config finds it."
fi

# Read last, so that it can also clear hooks that would touch the system's own lists and caches.
cat >"$work/apt/apt.conf" <<CONF
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::IndexTargets::deb;
#clear APT::Default-Release;
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$work/apt/sources";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "$work/apt/state";
Dir::State::Lists "$work/apt/state/lists";
Dir::State::status "/dev/null";
Dir::Cache "$work/apt/cache";
Dir::Cache::Archives "$work/apt/cache/archives";
APT::Sandbox::User "$(id -un)";
APT::Get::AllowUnauthenticated "false";
Acquire::AllowInsecureRepositories "false";
Acquire::Languages "none";
CONF

# Run a step; on failure show the end of what it said.
step() {
  what=$1
  shift
  if ! "$@" >>"$log" 2>&1; then
    say "$what failed:"
    tail -n 15 "$log" | sed 's/^/         /' >&2
    exit 1
  fi
}

say "the system's is older than $need: building Debian's ($suite) in $prefix"
step "reading the index of $suite from $found (is the network up, and debian-archive-keyring up to date?)" \
  fetch "the index of $suite" apt-get -c "$work/apt/apt.conf" -q -o APT::Update::Error-Mode=any update
cd "$work/source"
step "fetching the source package of libssh2 from $found" \
  fetch "the source package of libssh2" apt-get -c "$work/apt/apt.conf" -q source --download-only libssh2
step "unpacking the source package of libssh2" dpkg-source --no-check -x ./*.dsc "$work/source/libssh2"
cd libssh2
step "configuring libssh2" ./configure --prefix="$prefix" --libdir="$prefix/lib" --with-crypto=openssl \
  --without-libz --disable-shared --enable-static --with-pic --disable-tests --disable-examples-build \
  --disable-dependency-tracking
step "compiling libssh2" make -j"$(nproc 2>/dev/null || echo 2)"
step "installing libssh2" make install DESTDIR="$work/stage"

mkdir -p "$(dirname "$prefix")"
if ! mv -T "$work/stage$prefix" "$prefix" 2>>"$log"; then
  # Another run may have been faster, and its result is as good as ours.
  [ -e "$prefix/lib/pkgconfig/libssh2.pc" ] || fail "$prefix exists already and holds no libssh2: remove it."
fi
