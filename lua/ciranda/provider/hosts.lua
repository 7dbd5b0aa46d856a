--- A fleet from a list of hosts: machines that exist and that no cloud API is asked about.
--
--     hosts.slices({ hosts = "10.0.0.[1-8]", workers_per_slice = 4 })
--     hosts.slices({ file = "hosts.txt" })
--
-- A hosts file has one host a line: `ADDRESS [slice=N] [worker=N] [port=N] [name=NAME] [internal=ADDRESS]`;
-- `#` begins a comment.
local err = require("ciranda.io.error")
local nodeset = require("ciranda.provider.nodeset")

local M = {}

local OPTIONS = { hosts = true, file = true, workers_per_slice = true }
local FIELDS = { slice = true, worker = true, port = true, name = true, internal = true }

---@param where string
---@param format string
local function fail(where, format, ...)
  err.raise({
    code = "usage",
    op = "hosts",
    target = where,
    message = where .. ": " .. format:format(...),
  })
end

--- `host`, `host:port`, `[v6]:port` or a bare IPv6 address.
---@param text string
---@param where string
---@return { address: string, port: integer? }
local function parse_address(text, where)
  local address, port = text:match("^%[([^%]]+)%]:(%d+)$")
  if not address then
    address = text:match("^%[([^%]]+)%]$")
  end
  if not address then
    address, port = text:match("^([^:]+):(%d+)$")
  end
  address = address or text
  local number = port and math.tointeger(tonumber(port))
  if port and (number < 1 or number > 65535) then
    fail(where, "port %s is not between 1 and 65535", port)
  end
  if address:match("[%s/@]") or address:sub(1, 1) == "-" then
    fail(where, "%q is no address (the login user is given apart)", address)
  end
  return { address = address, port = number }
end

---@param line string
---@param where string
---@return table?
local function parse_line(line, where)
  local words = {}
  for word in line:gsub("#.*$", ""):gmatch("%S+") do
    words[#words + 1] = word
  end
  if #words == 0 then
    return nil
  end
  local host = parse_address(words[1], where)
  for place = 2, #words do
    local key, value = words[place]:match("^(%l+)=(.+)$")
    if not FIELDS[key] then
      fail(where, "%q is not slice=, worker=, port=, name= or internal=", words[place])
    elseif key == "name" or key == "internal" then
      host[key] = value
    else
      host[key] = math.tointeger(tonumber(value))
      if not host[key] or host[key] < 0 then
        fail(where, "%s is %q, but takes a whole number", key, value)
      end
    end
  end
  return host
end

--- Slices from hosts.
---@param options table hosts: names with brackets ("tpu[0-3],10.0.0.9:2222") or a list of them or of tables
---  { address, slice?, worker?, port?, name?, internal?, pins? }; file: path of a hosts file;
---  workers_per_slice: how many hosts, in order, make a slice (all of them) where they do not say themselves
---@return ciranda.Slice[]
-- Raises "usage" for a mistake, two hosts with one number, or no host at all; "not_found" for the file.
function M.slices(options)
  err.check_options(options, OPTIONS, "provider.hosts")
  local hosts = {}
  if options.file then
    local file, message = io.open(options.file)
    if not file then
      err.raise(err.wrap(message, { op = "hosts", target = options.file, code = "not_found" }))
    end
    local number = 0
    for line in file:lines() do
      number = number + 1
      hosts[#hosts + 1] = parse_line(line, ("%s line %d"):format(options.file, number))
    end
    file:close()
  end
  local given = options.hosts
  if type(given) == "string" then
    given = nodeset.expand_names(given)
  end
  for place, host in ipairs(given or {}) do
    if type(host) == "string" then
      hosts[#hosts + 1] = parse_address(host, ("host %d"):format(place))
    else
      local copy = {}
      for name, value in pairs(host) do
        copy[name] = value
      end
      hosts[#hosts + 1] = copy
    end
  end
  if #hosts == 0 then
    fail(options.file or "hosts", "there is no host in it")
  end

  local per_slice = options.workers_per_slice or #hosts
  local by_number, slices = {}, {}
  local unplaced = 0
  for _, host in ipairs(hosts) do
    local slice_number, worker_number = host.slice, host.worker
    if not slice_number and not worker_number then
      slice_number, worker_number = unplaced // per_slice, unplaced % per_slice
      unplaced = unplaced + 1
    end
    slice_number = slice_number or 0
    local slice = by_number[slice_number]
    if not slice then
      slice = { index = slice_number, name = "slice" .. slice_number, workers = {}, taken = {} }
      by_number[slice_number] = slice
      slices[#slices + 1] = slice
    end
    worker_number = worker_number or #slice.workers
    if slice.taken[worker_number] then
      fail(host.address, "slice %d worker %d is there twice", slice_number, worker_number)
    end
    slice.taken[worker_number] = true
    table.insert(slice.workers, {
      slice = slice_number,
      index = worker_number,
      node = slice.name,
      name = host.name or host.address,
      address = host.address,
      internal_address = host.internal,
      port = host.port,
      pins = host.pins,
    })
  end
  table.sort(slices, function(a, b)
    return a.index < b.index
  end)
  for _, slice in ipairs(slices) do
    slice.taken = nil
    table.sort(slice.workers, function(a, b)
      return a.index < b.index
    end)
  end
  return slices
end

return M
