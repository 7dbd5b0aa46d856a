--- Writes tar archives: ustar headers, with a pax header before an entry that ustar cannot describe.
--
-- The archive is written here and not by tar(1) because the manifest and the archive must agree: each file
-- is read once, and the bytes that are hashed are the bytes that are archived, even when somebody saves the
-- file in the middle. POSIX.1-2017 (pax, "ustar Interchange Format") is the reference.
local M = {}

local BLOCK = 512

---@class ciranda.tar.Entry
---@field path string relative, `/` between parts, no `..`
---@field type "file"|"directory"|"link"
---@field mode integer permission bits (07777)
---@field size integer bytes, 0 unless a file
---@field mtime integer seconds since 1970
---@field target string? for a link

--- An octal field of `width` bytes, its last one NUL; nil when the number does not fit.
---@param number integer
---@param width integer
---@return string?
local function octal(number, width)
  local digits = string.format("%o", number)
  if number < 0 or #digits > width - 1 then
    return nil
  end
  return string.rep("0", width - 1 - #digits) .. digits .. "\0"
end

-- The fields of a header and their widths; `string.pack` fills each with NUL.
local HEADER = "c100 c8 c8 c8 c12 c12 c8 c1 c100 c8 c32 c32 c8 c8 c155 c12"

--- Cuts a path into ustar's prefix (155 bytes) and name (100 bytes).
---@param path string
---@return string? name, string? prefix
local function split_path(path)
  if #path <= 100 then
    return path, ""
  end
  -- The name must not be empty, and a directory's closing `/` belongs to it.
  for position = math.min(#path - 1, 156), 2, -1 do
    if path:sub(position, position) == "/" and #path - position <= 100 then
      return path:sub(position + 1), path:sub(1, position - 1)
    end
  end
  return nil
end

---@param name string
---@param prefix string
---@param entry { mode: integer, size: integer, mtime: integer }
---@param kind string
---@param target string
---@return string block
local function header_block(name, prefix, entry, kind, target)
  local zero = octal(0, 8)
  local block = HEADER:pack(
    name,
    octal(entry.mode & 4095, 8),
    zero,
    zero,
    octal(entry.size, 12) or octal(0, 12),
    octal(math.max(entry.mtime, 0), 12) or octal(0, 12),
    "        ",
    kind,
    target,
    "ustar\0" .. "00",
    "",
    "",
    zero,
    zero,
    prefix,
    ""
  )
  -- Most of a block is NUL, which adds nothing to the sum.
  local bytes = { block:gsub("%z+", ""):byte(1, -1) }
  local sum = 0
  for place = 1, #bytes do
    sum = sum + bytes[place]
  end
  return block:sub(1, 148) .. string.format("%06o\0 ", sum) .. block:sub(157)
end

--- One record of a pax header: its length counts itself.
---@param key string
---@param value string
---@return string
local function pax_record(key, value)
  local rest = " " .. key .. "=" .. value .. "\n"
  local length = #rest + 1
  while #tostring(length) + #rest ~= length do
    length = #tostring(length) + #rest
  end
  return length .. rest
end

---@param size integer
---@return string zeros that fill the last block
function M.padding(size)
  return string.rep("\0", -size % BLOCK)
end

--- The header of an entry (with a pax header first where it is needed). The file's bytes and
--- `padding(size)` follow it.
---@param entry ciranda.tar.Entry
---@return string
function M.header(entry)
  local path = entry.type == "directory" and entry.path .. "/" or entry.path
  local kind = entry.type == "directory" and "5" or entry.type == "link" and "2" or "0"
  local target = entry.target or ""
  local records = {}
  local name, prefix = split_path(path)
  if not name then
    records[#records + 1] = pax_record("path", path)
    name, prefix = path:sub(1, 100), ""
  end
  if #target > 100 then
    records[#records + 1] = pax_record("linkpath", target)
    target = target:sub(1, 100)
  end
  if not octal(entry.size, 12) then
    records[#records + 1] = pax_record("size", tostring(entry.size))
  end
  local block = header_block(name, prefix, entry, kind, target)
  if #records == 0 then
    return block
  end
  local body = table.concat(records)
  local pax = { mode = 420, size = #body, mtime = entry.mtime }
  return header_block("./PaxHeaders/entry", "", pax, "x", "") .. body .. M.padding(#body) .. block
end

--- The two zero blocks at the end of an archive.
---@return string
function M.trailer()
  return string.rep("\0", 2 * BLOCK)
end

return M
