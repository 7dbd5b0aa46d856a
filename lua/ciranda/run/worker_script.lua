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

-- Templates cut at their names, since a fleet's workers fill in the same ones: text, name, text, ...
local cut, count = {}, 0
--- As many are kept; a process that has runs of many kinds begins anew.
local KEPT = 64

---@param template string
---@return string[]
local function pieces_of(template)
  local pieces = cut[template]
  if not pieces then
    pieces = {}
    local line, place = template:gsub("\n", " "), 1
    for text, name, after in line:gmatch("(.-){(%l[%l%d_]*)}()") do
      pieces[#pieces + 1] = text
      pieces[#pieces + 1] = name
      place = after
    end
    pieces[#pieces + 1] = line:sub(place)
    cut, count = count < KEPT and cut or {}, count < KEPT and count + 1 or 1
    cut[template] = pieces
  end
  return pieces
end

--- Fills `{name}` in a template and makes one line of it (csh cannot have a newline inside quotes).
---@param template string
---@param values table<string, any>
---@return string
function M.fill(template, values)
  local filled = {}
  for place, piece in ipairs(pieces_of(template)) do
    filled[place] = place % 2 == 1 and piece or tostring(values[piece]):gsub("\n", " ")
  end
  return table.concat(filled)
end

return M
