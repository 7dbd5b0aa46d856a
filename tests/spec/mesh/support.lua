-- What several specs of this room need. Loaded by path: specs are not on the module path.
local S = {}

--- Runs a function that must raise an error of ours, and returns it.
function S.refusal(fn, ...)
  local ok, err = pcall(fn, ...)
  assert(not ok, "expected a refusal")
  assert(type(err) == "table" and type(err.code) == "string", "not an error of ours: " .. tostring(err))
  return err
end

function S.product(list)
  local product = 1
  for _, value in ipairs(list) do
    product = product * value
  end
  return product
end

--- Links between all pairs of chips, by walking the torus link by link: nothing here knows a distance formula.
---@return fun(a: integer[], b: integer[]): integer
function S.links(dims, wrap)
  local function key(x, y, z)
    return x + dims[1] * (y + dims[2] * z)
  end
  local near = {}
  for z = 0, dims[3] - 1 do
    for y = 0, dims[2] - 1 do
      for x = 0, dims[1] - 1 do
        local own = {}
        for axis, position in ipairs({ x, y, z }) do
          for _, by in ipairs({ -1, 1 }) do
            local at = { x, y, z }
            at[axis] = position + by
            if wrap[axis] then
              at[axis] = at[axis] % dims[axis]
            end
            if at[axis] >= 0 and at[axis] < dims[axis] then
              own[#own + 1] = key(at[1], at[2], at[3])
            end
          end
        end
        near[key(x, y, z)] = own
      end
    end
  end
  local from = {}
  return function(a, b)
    local start, goal = key(a[1], a[2], a[3]), key(b[1], b[2], b[3])
    if not from[start] then
      local seen, queue, head = { [start] = 0 }, { start }, 1
      while queue[head] do
        local at = queue[head]
        head = head + 1
        for _, other in ipairs(near[at]) do
          if not seen[other] then
            seen[other] = seen[at] + 1
            queue[#queue + 1] = other
          end
        end
      end
      from[start] = seen
    end
    return from[start][goal]
  end
end

--- Hops of an axis' rings, counted with `links` over the ids of one slice of a grid.
---@return integer total, integer longest
function S.rings(ids, shape, axis, coords, links)
  local stride = 1
  for k = axis + 1, #shape do
    stride = stride * shape[k]
  end
  local total, longest = 0, 0
  for start = 0, #ids - 1 do
    if start // stride % shape[axis] == 0 then
      for step = 0, shape[axis] - 1 do
        local a = ids[start + step * stride + 1]
        local b = ids[start + (step + 1) % shape[axis] * stride + 1]
        local crossed = links(coords(a), coords(b))
        total, longest = total + crossed, math.max(longest, crossed)
      end
    end
  end
  return total, longest
end

return S
