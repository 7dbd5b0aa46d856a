--- What keeps a simulated worker apart from the machine it runs on.
--
-- Where the kernel allows it a worker is a mount, a pid and a host name namespace of its own: its own `/`, /tmp, /home,
-- /dev with the TPU devices, /etc/passwd, process list and boot id. The programs and libraries are the host's, bound
-- read-only. An ordinary user reaches that by way of a user namespace; there the worker's root is that user. Where the
-- kernel does not allow it, workers are directories, and libnss_wrapper gives each its own users and homes.
--
-- A worker with namespaces hangs on one process, its pid 1, which lives until its standard input ends: when the
-- simulator goes away, however it does, the kernel ends everything in the worker.

local errors = require("ciranda.io.error")
local fs = require("ciranda.io.fs")
local process = require("ciranda.io.process")
local task = require("ciranda.task")
local uv = require("luv")

local M = {}

-- Seconds for a worker to put its file systems together, and for its last process to go.
M.BOOT_DEADLINE = 30
M.HALT_DEADLINE = 5

-- $1 root, $2 directory for /etc/ssh, $3 host name, $4 file with the boot id, $5 the simulator's directory, $6 a
-- directory that all workers share, $7 "ro" to make the host's file systems read-only, and then the device files.
--
-- What is mounted is collected in a table and done by two calls of mount: a program started for each would be most of
-- the time that a boot takes.
local BOOT = [[
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$1 etc=$2 host=$3 boot_id=$4 state=$5 shared=$6 mode=$7
shift 7
read -r init rest < /proc/self/stat
mount --make-rprivate /
table=$root/run/fstab
mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$root/home" "$root/root" "$root/run/sshd" "$root/run/var/tmp" \
  "$root/run/var/log" "$root/run/old"
chmod 1777 "$root/tmp" "$root/run/var/tmp"

escaped() { # in fields of the table a space is \040
  case $1 in *' '*) printf '%s' "$1" | sed 's/ /\\040/g' ;; *) printf '%s' "$1" ;; esac
}
add() { # source, target below the root, type, options
  case $1$2$root in
    *' '*) printf '%s %s %s %s 0 0\n' "$(escaped "$1")" "$(escaped "$root$2")" "$3" "$4" ;;
    *) echo "$1 $root$2 $3 $4 0 0" ;;
  esac
}

links='' directories=''
for path in /*; do
  case $path in
    /proc | /dev | /tmp | /home | /root | /run | /mnt | /media | /boot | /lost+found | '/*') continue ;;
  esac
  if [ -L "$path" ]; then
    links="$links $path"
  elif [ -d "$path" ]; then
    case $path in *' '*) ;; *) directories="$directories $path" ;; esac
  fi
done
for path in $directories; do
  [ -d "$root$path" ] || missing="$missing $root$path"
done
[ -z "$missing" ] || mkdir $missing
[ -z "$links" ] || cp -P --remove-destination $links "$root/"
{
  for path in $directories; do
    if [ "$mode" = ro ]; then add "$path" "$path" none rbind,ro; else add "$path" "$path" none rbind; fi
  done
  add proc /proc proc defaults
  add dev /dev tmpfs mode=755
} > "$table"
mount -a -T "$table"

if [ "$mode" = ro ]; then
  failed=''
  while read -r id parent device from at options rest; do
    case $at,$options in
      "$root"/proc*,* | "$root"/dev,* | *,ro | *,ro,*) ;;
      "$root"/*) mount -o remount,bind,ro "$(printf '%b' "$at")" 2>/dev/null || failed=$at ;;
    esac
  done < /proc/self/mountinfo
  case $failed in '' | "$root"/sys*) ;; *) echo "cannot make $failed read-only" >&2; exit 1 ;; esac
fi

mkdir "$root/dev/pts" "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for name in null zero full random urandom tty; do
  : > "$root/dev/$name"
done
for device; do
  [ -d "$root${device%/*}" ] || mkdir -p "$root${device%/*}"
  : > "$root$device"
done
[ -z "$1" ] || chmod 666 "${root}${1%/*}"/*[0-9]
if [ -d "$root$state" ]; then
  mount -t tmpfs -o mode=755 hidden "$root$state"
fi
mkdir -p "$root$shared"
{
  for name in null zero full random urandom tty; do
    add "/dev/$name" "/dev/$name" none bind
  done
  add devpts /dev/pts devpts newinstance,ptmxmode=0666,mode=620
  add shm /dev/shm tmpfs mode=1777
  for name in tmp log; do
    [ ! -d "$root/var/$name" ] || add "$root/run/var/$name" "/var/$name" none bind
  done
  add "$shared" "$shared" none rbind
  add "$etc" /etc/ssh none bind
  for name in passwd group shadow hosts; do
    [ ! -e "$etc/$name" ] || [ ! -e "$root/etc/$name" ] || add "$etc/$name" "/etc/$name" none bind
  done
  add "$boot_id" /proc/sys/kernel/random/boot_id none bind
} > "$table"
mount -a -T "$table"
resolver=$(readlink -f /etc/resolv.conf || true)
case $resolver in
  /run/*) mkdir -p "$root${resolver%/*}"; cp "$resolver" "$root$resolver" 2>/dev/null || true ;;
esac
hostname "$host"
mount --rbind "$root" "$root"
cd "$root"
pivot_root . run/old
exec chroot . /bin/sh -c '
  umount -l /run/old && rmdir /run/old || exit 1
  rm /run/fstab
  echo "ready $0"
  exec >/dev/null 2>&1
  exec 3<&0
  cat <&3 &
  exec 3<&-
  wait $!
' "$init"
]]

-- $1 bytes that are free, $2 an option of overlay. What is on the disk stays to be read; what is written goes to a file
-- system that has no more room than that.
local FILL = [[
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
full=/run/full
if [ -d $full ]; then
  umount /home /root /tmp /var/tmp $full
fi
mkdir -p $full
mount -t tmpfs -o mode=755,size=$((4096 + $1)) full $full
for path in /home /root /tmp /var/tmp; do
  upper=$full$path/upper work=$full$path/work
  mkdir -p "$upper" "$work"
  chown --reference=$path "$upper"
  chmod --reference=$path "$upper"
  mount -t overlay -o "$2lowerdir=$path,upperdir=$upper,workdir=$work" full $path
done
head -c 4096 /dev/zero > $full/filler
]]

---@class ciranda.sim.Isolation
---@field kind string "root" or "user", with namespaces; "none"
---@field reason string? why there are none
---@field private script string path of the boot script
local Isolation = {}
Isolation.__index = Isolation

---@class ciranda.sim.Place what an Isolation needs to know of a worker
---@field root string directory that becomes `/`
---@field etc string directory that becomes /etc/ssh
---@field hostname string
---@field boot_id string file
---@field devices string[] absolute paths, as the worker sees them

local function program(name)
  for _, directory in ipairs({ "/usr/sbin", "/usr/bin", "/sbin", "/bin" }) do
    local path = directory .. "/" .. name
    if uv.fs_access(path, "X") then
      return path
    end
  end
  return nil
end

M.program = program

-- Start pid 1 of a worker and wait until the worker is there.
local function start(self, place)
  local argv = { program("unshare"), "-m", "-p", "-u", "-f", "--kill-child" }
  if self.kind == "user" then
    table.insert(argv, "-U")
    table.insert(argv, "-r")
  end
  for _, word in ipairs({ "/bin/sh", self.script, place.root, place.etc, place.hostname, place.boot_id }) do
    table.insert(argv, word)
  end
  table.insert(argv, self.directory)
  table.insert(argv, self.shared)
  table.insert(argv, self.kind == "root" and "ro" or "rw")
  table.move(place.devices, 1, #place.devices, #argv + 1, argv)
  argv.stdin, argv.stdout, argv.stderr = process.PIPE, process.PIPE, process.PIPE
  local init = process.spawn(argv)
  local ok, pid = pcall(task.timeout, M.BOOT_DEADLINE, function()
    local text = ""
    repeat
      local chunk = init.stdout:read()
      text = text .. (chunk or "")
      local found = text:match("ready (%d+)\n")
      if found then
        return tonumber(found)
      end
    until not chunk
    local said = ""
    for chunk in
      function()
        return init.stderr:read()
      end
    do
      said = said .. chunk
    end
    errors.raise({ code = "failed", message = said:match("([^\n]+)\n?$") or "it ended without a word" })
  end)
  if not ok then
    init:close()
    error(errors.wrap(pid, { op = "sim.boot", target = place.hostname }), 0)
  end
  return { process = init, pid = pid }
end

--- Find out what this machine allows.
---@async
---@param directory string the simulator's own, which exists
---@param shared string a directory that every worker sees at the same path
---@param wanted string? "auto" (the default), "none", or "namespaces", which fails where there can be none
---@return ciranda.sim.Isolation
function M.probe(directory, shared, wanted)
  local self = setmetatable({ directory = directory, shared = shared }, Isolation)
  if wanted == "none" then
    self.kind, self.reason = "none", "asked for"
    return self
  end
  self.script = directory .. "/boot.sh"
  fs.write(self.script, BOOT, { mode = 420, sync = false })
  self.kind = uv.getuid() == 0 and "root" or "user"
  local reason
  for _, name in ipairs({ "unshare", "nsenter", "mount", "pivot_root", "chroot" }) do
    reason = reason or not program(name) and "there is no program " .. name or nil
  end
  if not reason then
    local trial = directory .. "/trial"
    fs.mkdir_p(trial .. "/etc")
    fs.mkdir_p(trial .. "/root")
    fs.write(trial .. "/boot_id", "00000000-0000-0000-0000-000000000000\n", { sync = false })
    local ok, init = pcall(start, self, {
      root = trial .. "/root",
      etc = trial .. "/etc",
      hostname = "trial",
      boot_id = trial .. "/boot_id",
      devices = {},
    })
    if ok then
      self:stop(init)
    else
      reason = errors.text(init)
    end
    fs.remove_tree(trial)
  end
  if reason and wanted == "namespaces" then
    errors.raise({
      code = "unsupported",
      message = "workers cannot have namespaces of their own here: " .. reason,
    })
  elseif reason then
    self.kind, self.reason = "none", reason
  end
  return self
end

--- Boot a worker. Without namespaces there is nothing to do.
---@async
---@param place ciranda.sim.Place
---@return table? init for `stop` and `argv`
function Isolation:start(place)
  if self.kind == "none" then
    return nil
  end
  return start(self, place)
end

--- End a worker and everything in it.
---@async
---@param init table?
function Isolation:stop(init)
  if not init then
    return
  end
  uv.kill(init.pid, "sigkill")
  init.process:close()
end

--- Leave a worker no more room to write than so many bytes.
---@async
---@param init table? what `start` returned
---@param free integer
---@return string? problem why that cannot be done here
function Isolation:fill_disk(init, free)
  if not init then
    return "it needs namespaces (" .. self.reason .. ")"
  end
  local option = self.kind == "user" and "userxattr," or ""
  local argv = self:argv(init, { "/bin/sh", "-c", FILL, "fill", tostring(free), option }, true)
  argv.timeout = M.BOOT_DEADLINE
  local result = process.run(argv)
  if result.code ~= 0 then
    return result.stderr:match("([^\n]+)\n?$") or result:reason()
  end
  return nil
end

--- How to run a program in a worker.
---@param init table? what `start` returned
---@param argv string[] the program's path and arguments
---@param as_root boolean as the worker's root, else as whoever runs the simulator
---@return string[]
function Isolation:argv(init, argv, as_root)
  if not init then
    return argv
  end
  local result = { program("nsenter"), "-t", tostring(init.pid), "-m", "-p", "-u" }
  if self.kind == "user" then
    table.move({ "-U", "--preserve-credentials" }, 1, 2, #result + 1, result)
  end
  if self.kind == "user" and not as_root then
    local back = {
      program("unshare"),
      "-U",
      ("--map-user=%d"):format(uv.getuid()),
      ("--map-group=%d"):format(uv.getgid()),
    }
    table.move(back, 1, #back, #result + 1, result)
  end
  return table.move(argv, 1, #argv, #result + 1, result)
end

return M
