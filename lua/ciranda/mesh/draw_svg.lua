--- The mesh as SVG: the torus of a slice with the rings of each axis, the hops, and the links between slices.
--
-- One panel an axis. Chips are coloured by their index along it, so a ring that runs well is a smooth change of
-- colour. Steps of one link are dark lines, longer ones red arcs with the number of links; steps over the wraparound
-- leave the plane on one side and come back on the other; steps to another plane (z) are small triangles.
local fault = require("ciranda.mesh.fault")
local picture_room = require("ciranda.mesh.picture")

local M = {}

local INK, FAINT, LONG, DCN = "#22384f", "#c9d1d9", "#c62828", "#e07b00"
local MARGIN, GAP = 24, 34
--- From a panel's top to its torus.
local HEAD = 52
--- Panels stand beside each other up to this width.
local PAGE = 1500
local FONT = "DejaVu Sans, Verdana, Arial, sans-serif"

---@class ciranda.mesh.Canvas
local Canvas = {}
Canvas.__index = Canvas

local function canvas()
  return setmetatable({ parts = {}, labels = {} }, Canvas)
end

--- The number of links of a long step: drawn when everything else is, so that no chip hides it.
function Canvas:links(x, y, size, links)
  self.labels[#self.labels + 1] = { x, y, size, links }
end

function Canvas:draw_labels()
  for _, label in ipairs(self.labels) do
    local x, y, size, links = label[1], label[2], label[3], label[4]
    self:add(
      '<circle cx="%.1f" cy="%.1f" r="%.1f" fill="#ffffff" stroke="%s" stroke-width="0.8"/>',
      x,
      y,
      size * 0.68,
      LONG
    )
    self:text(x, y + size * 0.36, size, tostring(links), { fill = LONG, anchor = "middle" })
  end
  self.labels = {}
end

function Canvas:add(format, ...)
  self.parts[#self.parts + 1] = format:format(...)
end

local function escaped(text)
  return (text:gsub('[&<>"]', { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

function Canvas:text(x, y, size, text, options)
  options = options or {}
  self:add(
    '<text x="%.1f" y="%.1f" font-size="%.1f" fill="%s" text-anchor="%s"%s>%s</text>',
    x,
    y,
    size,
    options.fill or INK,
    options.anchor or "start",
    options.bold and ' font-weight="bold"' or "",
    escaped(text)
  )
end

function Canvas:line(x1, y1, x2, y2, colour, width, dash)
  self:add(
    '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="%.1f"%s/>',
    x1,
    y1,
    x2,
    y2,
    colour,
    width,
    dash and (' stroke-dasharray="%s"'):format(dash) or ""
  )
end

--- Pixels between chips: large for a few, small for many.
local function pitch_of(picture)
  local widest = math.max(picture.dims[1], picture.dims[2])
  local planes = picture.dims[3]
  if widest <= 4 and planes <= 2 then
    return 64
  elseif widest <= 8 and planes <= 4 then
    return 46
  end
  return widest <= 8 and 36 or 34
end

--- Where planes and chips of a panel stand.
local function geometry(picture, pitch)
  local dims = picture.dims
  local wide, high = dims[1] * pitch, dims[2] * pitch
  local columns = math.min(dims[3], math.max(1, (PAGE - MARGIN) // (wide + GAP)), 4)
  local rows = (dims[3] + columns - 1) // columns
  local head = dims[3] > 1 and 16 + pitch // 4 or 0
  return {
    pitch = pitch,
    wide = wide,
    high = high,
    width = columns * wide + (columns - 1) * GAP,
    height = rows * (high + head) + (rows - 1) * GAP,
    plane = function(z)
      return z % columns * (wide + GAP), z // columns * (high + head + GAP) + head
    end,
  }
end

local function centre(place, x, y, z, origin_x, origin_y)
  local px, py = place.plane(z)
  return origin_x + px + (x + 0.5) * place.pitch, origin_y + py + (y + 0.5) * place.pitch
end

--- Links between neighbours, stubs where an axis wraps around, and the hosts.
local function draw_torus(out, picture, place, left, top)
  local dims, host, pitch = picture.dims, picture.host, place.pitch
  for z = 0, dims[3] - 1 do
    local px, py = place.plane(z)
    if dims[3] > 1 then
      out:text(left + px, top + py - pitch // 4 - 4, 11, ("z = %d"):format(z))
    end
    for hy = 0, dims[2] - 1, host[2] do
      for hx = 0, dims[1] - 1, host[1] do
        out:add(
          '<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" rx="6" fill="#f4f6f8" stroke="#e3e8ed"/>',
          left + px + hx * pitch + 2,
          top + py + hy * pitch + 2,
          host[1] * pitch - 4,
          host[2] * pitch - 4
        )
      end
    end
    for y = 0, dims[2] - 1 do
      for x = 0, dims[1] - 1 do
        local cx, cy = centre(place, x, y, z, left, top)
        if x + 1 < dims[1] then
          out:line(cx, cy, cx + pitch, cy, FAINT, 2)
        elseif picture.wrap[1] and dims[1] > 1 then
          out:line(cx, cy, cx + pitch * 0.75, cy, FAINT, 2, "3 2")
          out:line(cx - (dims[1] - 0.25) * pitch, cy, cx - (dims[1] - 1) * pitch, cy, FAINT, 2, "3 2")
        end
        if y + 1 < dims[2] then
          out:line(cx, cy, cx, cy + pitch, FAINT, 2)
        elseif picture.wrap[2] and dims[2] > 1 then
          out:line(cx, cy, cx, cy + pitch * 0.75, FAINT, 2, "3 2")
          out:line(cx, cy - (dims[2] - 0.25) * pitch, cx, cy - (dims[2] - 1) * pitch, FAINT, 2, "3 2")
        end
      end
    end
  end
end

--- The short way along an axis: how far, in which direction, and whether over the wraparound.
local function shift(picture, axis, from, to)
  local away, length = to - from, picture.dims[axis]
  if picture.wrap[axis] and math.abs(away) * 2 > length then
    return away > 0 and away - length or away + length, true
  end
  return away, false
end

--- One step of a ring.
local function draw_step(out, picture, place, left, top, a, b, width)
  local pitch = place.pitch
  local dx, over_x = shift(picture, 1, a.x, b.x)
  local dy, over_y = shift(picture, 2, a.y, b.y)
  local dz = shift(picture, 3, a.z, b.z)
  local links = math.abs(dx) + math.abs(dy) + math.abs(dz)
  if links == 0 then
    return
  end
  local colour = links == 1 and INK or LONG
  local ax, ay = centre(place, a.x, a.y, a.z, left, top)
  local bx, by = centre(place, b.x, b.y, b.z, left, top)
  if dz ~= 0 then
    -- Up to the next plane: a triangle at the upper right that points out; arrival at the lower left.
    local size = math.max(4, pitch * 0.14)
    for _, end_ in ipairs({ { ax, ay, 1 }, { bx, by, -1 } }) do
      local x, y = end_[1] + end_[3] * pitch * 0.36, end_[2] - end_[3] * pitch * 0.36
      out:add(
        '<path d="M%.1f %.1f l%.1f 0 l0 %.1f z" fill="%s" fill-opacity="%.2f"/>',
        x + size / 2,
        y - size / 2,
        -size * 1.4,
        size * 1.4,
        colour,
        end_[3] > 0 and 1 or 0.45
      )
    end
    if links > 1 then
      out:text(ax + pitch * 0.1, ay - pitch * 0.3, math.max(7, pitch * 0.2), tostring(links), { fill = LONG })
    end
    return
  end
  if over_x or over_y then
    local ux, uy = over_x and (dx > 0 and 1 or -1) or 0, over_y and (dy > 0 and 1 or -1) or 0
    local reach = pitch * 0.72
    out:line(ax, ay, ax + ux * reach, ay + uy * reach, colour, width)
    out:line(bx - ux * reach, by - uy * reach, bx, by, colour, width)
    if links > 1 and width > 1.5 then
      out:links(ax + ux * reach, ay + uy * reach, math.max(8, pitch * 0.2), links)
    end
    return
  end
  if links == 1 then
    out:line(ax, ay, bx, by, colour, width)
    return
  end
  -- An arc, bowed to the right of the way it goes.
  local mx, my = (ax + bx) / 2, (ay + by) / 2
  local length = math.sqrt((bx - ax) ^ 2 + (by - ay) ^ 2)
  local bow = math.min(pitch * 0.42, length * 0.22)
  local nx, ny = -(by - ay) / length * bow, (bx - ax) / length * bow
  out:add(
    '<path d="M%.1f %.1f Q%.1f %.1f %.1f %.1f" fill="none" stroke="%s" stroke-width="%.1f"/>',
    ax,
    ay,
    mx + 2 * nx,
    my + 2 * ny,
    bx,
    by,
    colour,
    width
  )
  if width > 1.5 then
    out:links(mx + nx, my + ny, math.max(8, pitch * 0.2), links)
  end
end

--- All rings of an axis: chips in ring order, by the indices along the other axes.
local function rings_of(picture, axis)
  local rings, keys = {}, {}
  for _, chip in pairs(picture.chips) do
    for _, index in ipairs(chip.devices) do
      local others = {}
      for other, value in ipairs(index) do
        others[#others + 1] = other == axis and "" or tostring(value)
      end
      local key = table.concat(others, ",")
      if not rings[key] then
        rings[key] = { first = true }
        keys[#keys + 1] = key
      end
      rings[key][index[axis] + 1] = chip
      for other, value in ipairs(index) do
        if other ~= axis and value ~= 0 then
          rings[key].first = false
        end
      end
    end
  end
  table.sort(keys)
  local out = {}
  for position, key in ipairs(keys) do
    out[position] = rings[key]
  end
  return out
end

local function draw_chips(out, picture, place, left, top, axis)
  local pitch = place.pitch
  local side = pitch * 0.58
  local count = picture.order.ici[axis]
  local places = {}
  for at in pairs(picture.chips) do
    places[#places + 1] = at
  end
  table.sort(places)
  for _, at in ipairs(places) do
    local chip = picture.chips[at]
    local cx, cy = centre(place, chip.x, chip.y, chip.z, left, top)
    local red, green, blue = picture_room.hue(chip.devices[1][axis], count, 0.62, 0.78)
    out:add(
      '<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" rx="%.1f" fill="#%02x%02x%02x" stroke="%s" '
        .. 'stroke-width="0.8"/>',
      cx - side / 2,
      cy - side / 2,
      side,
      side,
      side * 0.2,
      red,
      green,
      blue,
      INK
    )
    local labels = {}
    for core, index in ipairs(chip.devices) do
      if core == 1 or index[axis] ~= chip.devices[1][axis] then
        labels[#labels + 1] = tostring(index[axis])
      end
    end
    local text = table.concat(labels, "·")
    local size = math.min(pitch * 0.3, side * 1.55 / math.max(#text, 2))
    out:text(cx, cy + size * 0.36, size, text, { anchor = "middle" })
  end
end

local function draw_panel(out, picture, place, left, top, axis)
  out:text(left, top + 14, 14, picture.names[axis] .. " " .. picture.order.ici[axis], { bold = true })
  local hops = picture.order.hops[axis]
  out:text(
    left,
    top + 31,
    11.5,
    ("%d ring%s, %.4g links each, longest step %d"):format(
      hops.rings,
      hops.rings == 1 and "" or "s",
      hops.total / hops.rings,
      hops.longest
    )
  )
  local jax = picture.order.improved and picture.order.jax
  if jax then
    local other = jax.hops[axis]
    out:text(
      left,
      top + 47,
      11.5,
      ("JAX's order: %.4g links, longest step %d"):format(other.total / other.rings, other.longest)
    )
  end
  local y = top + HEAD + (jax and 16 or 0)
  draw_torus(out, picture, place, left, y)
  local first
  for _, ring in ipairs(rings_of(picture, axis)) do
    if ring.first then
      first = ring
    else
      for step = 1, #ring do
        draw_step(out, picture, place, left, y, ring[step], ring[step % #ring + 1], 1.2)
      end
    end
  end
  for step = 1, #first do
    draw_step(
      out,
      picture,
      place,
      left,
      y,
      first[step],
      first[step % #first + 1],
      math.max(2.4, place.pitch * 0.07)
    )
  end
  draw_chips(out, picture, place, left, y, axis)
  out:draw_labels()
end

--- The slices in a row, joined along each axis that spans them.
local function draw_slices(out, picture, left, top, width)
  local shown = math.min(picture.slices, math.max(2, math.min(12, (width + 16) // 96)))
  local across = picture.across
  local names = {}
  for position, axis in ipairs(across) do
    names[position] = ("%s %d"):format(picture.names[axis], picture.order.dcn[axis])
  end
  out:text(left, top + 14, 14, "DCN: " .. table.concat(names, " × "), { bold = true })
  out:text(
    left,
    top + 31,
    11.5,
    ("%d slices, each like the one drawn%s; neighbours along an axis exchange over the data-center network"):format(
      picture.slices,
      shown < picture.slices and (", %d shown"):format(shown) or ""
    )
  )
  local box_width, box_height, gap = 80, 24 + 13 * #across, 16
  local y = top + 44
  local function middle(slice)
    return left + slice * (box_width + gap) + box_width / 2
  end
  for slice = 0, shown - 1 do
    local x = left + slice * (box_width + gap)
    local index = picture_room.slice_index(picture, slice)
    out:add(
      '<rect x="%.1f" y="%.1f" width="%d" height="%d" rx="6" fill="#fff4e5" stroke="%s"/>',
      x,
      y,
      box_width,
      box_height,
      DCN
    )
    out:text(x + box_width / 2, y + 15, 11.5, ("slice %d"):format(slice), { anchor = "middle", bold = true })
    for position, axis in ipairs(across) do
      out:text(
        x + box_width / 2,
        y + 16 + 12 * position,
        10.5,
        ("%s %d"):format(picture.names[axis], index[axis]),
        {
          anchor = "middle",
        }
      )
    end
  end
  local stride, lane = 1, 0
  for position = #picture.order.dcn, 1, -1 do
    local size = picture.order.dcn[position]
    if size > 1 then
      local base = y + box_height + 2
      local depth = 16 + 13 * lane
      for slice = 0, shown - 1 do
        local to = slice + stride
        if slice // stride % size ~= size - 1 and to < shown then
          out:add(
            '<path d="M%.1f %.1f C%.1f %.1f %.1f %.1f %.1f %.1f" fill="none" stroke="%s" stroke-width="2.2"%s/>',
            middle(slice) + 4 * lane,
            base,
            middle(slice) + 4 * lane,
            base + depth,
            middle(to) + 4 * lane,
            base + depth,
            middle(to) + 4 * lane,
            base,
            DCN,
            lane > 0 and ' stroke-dasharray="6 3"' or ""
          )
        end
      end
      lane = lane + 1
    end
    stride = stride * size
  end
  return 44 + box_height + 20 + 13 * lane
end

local OPTIONS = { names = true, title = true }

--- Draws an order.
---@param order ciranda.mesh.Order
---@param options { names: string[]?, title: string? }?
---@return string svg
function M.svg(order, options)
  options = fault.options(options, OPTIONS, "draw.svg")
  local picture = picture_room.of(order, options.names, options.title)
  local place = geometry(picture, pitch_of(picture))
  local axes = #picture.axes > 0 and picture.axes or { 1 }

  local panel_width = math.max(place.width, 230)
  local panel_height = HEAD + (order.improved and order.jax and 16 or 0) + place.height + 30
  local abreast = math.max(1, math.min(#axes, (PAGE - 2 * MARGIN + 50) // (panel_width + 50)))
  local rows = (#axes + abreast - 1) // abreast
  local width = math.max(2 * MARGIN + abreast * panel_width + (abreast - 1) * 50, 620)
  local out = canvas()
  out:text(MARGIN, 34, 18, picture.title, { bold = true })
  out:text(MARGIN, 54, 12, picture_room.source(order))
  local top = 74
  for position, axis in ipairs(axes) do
    local column, row = (position - 1) % abreast, (position - 1) // abreast
    draw_panel(out, picture, place, MARGIN + column * (panel_width + 50), top + row * panel_height, axis)
  end
  top = top + rows * panel_height
  if picture.slices > 1 then
    top = top + draw_slices(out, picture, MARGIN, top + 4, width - 2 * MARGIN) + 10
  end

  local key = top + 14
  out:line(MARGIN, key - 4, MARGIN + 26, key - 4, INK, 2.4)
  out:text(MARGIN + 32, key, 11, "one link")
  out:line(MARGIN + 100, key - 4, MARGIN + 126, key - 4, LONG, 2.4)
  out:text(MARGIN + 132, key, 11, "a step of several links")
  out:line(MARGIN + 280, key - 4, MARGIN + 306, key - 4, FAINT, 2.4)
  out:text(MARGIN + 312, key, 11, "ICI link not used by the axis")
  out:text(
    MARGIN,
    key + 17,
    11,
    "thick: the first ring; number: index along the axis; grey boxes: hosts; dashed ends: wraparound"
  )
  if picture.dims[3] > 1 then
    out:text(
      MARGIN,
      key + 34,
      11,
      "triangles: a step to another plane (dark where it leaves, pale where it arrives)"
    )
  end
  local height = key + 50
  return (
    '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="%s">\n'
    .. '<rect width="100%%" height="100%%" fill="#ffffff"/>\n%s\n</svg>\n'
  ):format(width, height, width, height, FONT, table.concat(out.parts, "\n"))
end

return M
