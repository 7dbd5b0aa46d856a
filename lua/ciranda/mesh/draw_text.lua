--- The mesh in a terminal: each chip of a slice with its indices, plane by plane, coloured along one axis.
local fault = require("ciranda.mesh.fault")
local picture_room = require("ciranda.mesh.picture")

local M = {}

local OPTIONS = { names = true, title = true, colour = true, width = true, axis = true }

--- Which axis the colours follow: the one asked for, else the longest.
local function coloured_axis(picture, wanted)
  if wanted then
    for axis, name in ipairs(picture.names) do
      if name == wanted then
        return axis
      end
    end
    fault.misuse("draw.text: there is no axis '%s'", wanted)
  end
  local longest
  for _, axis in ipairs(picture.axes) do
    if not longest or picture.order.ici[axis] > picture.order.ici[longest] then
      longest = axis
    end
  end
  return longest
end

local function label(picture, index)
  local parts = {}
  for position, axis in ipairs(picture.axes) do
    parts[position] = tostring(index[axis])
  end
  return #parts > 0 and table.concat(parts, ".") or "0"
end

--- The cells of all chips and the width of the widest.
local function cells(picture)
  local out, width = {}, 1
  for place, chip in pairs(picture.chips) do
    local parts = {}
    for core, index in ipairs(chip.devices) do
      parts[core] = label(picture, index)
    end
    out[place] = table.concat(parts, "/")
    width = math.max(width, #out[place])
  end
  return out, width
end

--- One plane as lines of equal visible width.
local function plane_lines(picture, texts, width, z, paint)
  local dims, host = picture.dims, picture.host
  local lines = {}
  for y = 0, dims[2] - 1 do
    local parts = {}
    for x = 0, dims[1] - 1 do
      local place = 1 + x + dims[1] * (y + dims[2] * z)
      local cell = (" "):rep(width - #texts[place]) .. texts[place]
      -- Two blanks between hosts, one between the chips of one.
      local gap = x == 0 and "" or x % host[1] == 0 and "  " or " "
      parts[#parts + 1] = gap .. paint(picture.chips[place], cell)
    end
    lines[#lines + 1] = table.concat(parts)
  end
  return lines
end

local function plane_width(picture, width)
  local hosts = picture.dims[1] // picture.host[1]
  return picture.dims[1] * width + picture.dims[1] - 1 + hosts - 1
end

local function slice_table(picture, lines)
  if picture.slices == 1 then
    return
  end
  local names = {}
  for position, axis in ipairs(picture.across) do
    names[position] = ("%s %d"):format(picture.names[axis], picture.order.dcn[axis])
  end
  lines[#lines + 1] = ("DCN: %s over %d slices, each like the one drawn"):format(
    table.concat(names, " x "),
    picture.slices
  )
  local parts, shown = {}, math.min(picture.slices, 16)
  for slice = 0, shown - 1 do
    local index, own = picture_room.slice_index(picture, slice), {}
    for position, axis in ipairs(picture.across) do
      own[position] = ("%s %d"):format(picture.names[axis], index[axis])
    end
    parts[#parts + 1] = ("slice %d: %s"):format(slice, table.concat(own, ", "))
  end
  if shown < picture.slices then
    parts[#parts + 1] = ("... slice %d"):format(picture.slices - 1)
  end
  for first = 1, #parts, 4 do
    lines[#lines + 1] = "  " .. table.concat(parts, " | ", first, math.min(first + 3, #parts))
  end
end

--- Draws an order.
---@param order ciranda.mesh.Order
---@param options { names: string[]?, title: string?, colour: boolean?, width: integer?, axis: string? }?
---       `colour` adds ANSI colours (false when absent), along `axis` (the longest when absent); `width` of the
---       terminal, 100 when absent
---@return string lines, without a newline at the end
function M.text(order, options)
  options = fault.options(options, OPTIONS, "draw.text")
  local picture = picture_room.of(order, options.names, options.title)
  local lines = { picture.title .. ": " .. picture_room.source(order) }
  local along = coloured_axis(picture, options.axis)
  local parts = {}
  for position, axis in ipairs(picture.axes) do
    parts[position] = ("%s (%d)"):format(picture.names[axis], order.ici[axis])
  end
  if #parts > 0 then
    lines[#lines + 1] = ("each chip: %s%s"):format(
      table.concat(parts, " . "),
      #picture.chips[1].devices > 1 and ", its two devices with / between" or ""
    )
    lines[#lines + 1] = "x to the right, y down; two blanks between hosts"
      .. (options.colour and along and "; coloured by " .. picture.names[along] or "")
  end

  local function paint(chip, cell)
    if not options.colour or not along then
      return cell
    end
    local red, green, blue = picture_room.hue(chip.devices[1][along], order.ici[along], 0.6, 0.75)
    return ("\27[48;2;%d;%d;%dm\27[30m%s\27[0m"):format(red, green, blue, cell)
  end
  local texts, width = cells(picture)
  local wide = plane_width(picture, width)
  local abreast = math.max(1, ((options.width or 100) + 3) // (wide + 3))
  for first = 0, picture.dims[3] - 1, abreast do
    local last = math.min(first + abreast, picture.dims[3]) - 1
    lines[#lines + 1] = ""
    if picture.dims[3] > 1 then
      local heads = {}
      for z = first, last do
        heads[#heads + 1] = ("z = %d"):format(z) .. (" "):rep(math.max(0, wide - #("z = %d"):format(z)))
      end
      lines[#lines + 1] = (table.concat(heads, "   "):gsub("%s+$", ""))
    end
    local planes = {}
    for z = first, last do
      planes[#planes + 1] = plane_lines(picture, texts, width, z, paint)
    end
    for y = 1, picture.dims[2] do
      local row = {}
      for position, plane in ipairs(planes) do
        row[position] = plane[y]
      end
      lines[#lines + 1] = table.concat(row, "   ")
    end
  end
  lines[#lines + 1] = ""
  for _, axis in ipairs(picture.axes) do
    lines[#lines + 1] = picture_room.rings(picture, axis)
  end
  slice_table(picture, lines)
  return table.concat(lines, "\n")
end

return M
