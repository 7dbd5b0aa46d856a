--- What the scripts that run on workers share: how they are filled in, and where a worker's own things are.
--
-- A script is one line for `sh -c`, whatever the login shell is.
local M = {}

--- Where the accelerator library's lock, the devices, the boot id and the leases are. CIRANDA_GUARD_OPTIONS is the
--- worker's own setting, which the guard follows too; the others are the guard's defaults.
M.LOCATE = [[
lock=/tmp/libtpu_lockfile; devices=/dev/accel,/dev/vfio/; boot=/proc/sys/kernel/random/boot_id;
set -- $CIRANDA_GUARD_OPTIONS;
while [ $# -gt 1 ]; do case $1 in --lock) lock=$2;; --devices) devices=$2;; --boot-id-file) boot=$2;; esac;
shift; done;
lease=${lock%/*}/ciranda_lease; mine=$lease.${USER:-$(id -un)};
]]

--- Fills `{name}` in a template and makes one line of it (csh cannot have a newline inside quotes).
---@param template string
---@param values table<string, any>
---@return string
function M.fill(template, values)
  return (
    template
      :gsub("{(%l[%l%d_]*)}", function(name)
        return tostring(values[name])
      end)
      :gsub("\n", " ")
  )
end

return M
