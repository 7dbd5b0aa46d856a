--- Makes a C file of the Lua modules (and the guard) for engine/embedded.h.
---
---     embed cmake/embed.lua OUTPUT LIST [GUARD]
---
--- LIST is a file of lines "name path file": the module's name, the chunk's name and the file to read.
---
--- Modules are embedded compiled, unstripped, so that line numbers and names in tracebacks hold: that saves every start
--- of a recipe some ten milliseconds. Those of TEXT are embedded as text without its comments, which takes half the
--- room and compiles to the same chunk. Everything is packed with a dictionary of what the modules share, as each is
--- unpacked by itself.
local deflate = deflate -- luacheck: read_globals deflate

local output_path, list_path, guard_path = ...

--- Whole rooms of which a start needs a table at most, or whose work takes long anyway: the planner of shardings and
--- the simulated cloud.
local TEXT = { ["ciranda.data"] = true, ["ciranda.mesh"] = true, ["ciranda.sim"] = true }

local DICTIONARY = 32768 -- bytes; deflate looks no further back
local SEGMENT = 64 -- bytes; of 32, 64 and 200 the one that made the program smallest
local SHARED = 6 -- bytes that count as something shared; 8 were worse

local function read(path)
  local file = assert(io.open(path, "rb"))
  local bytes = assert(file:read("a"))
  file:close()
  return bytes
end

--- Where the token at `at` ends: a comment, a string, a line's end with the indentation after it, else one byte.
--- The second value is what stands for it.
local function token(text, at)
  local long = text:match("^%[(=*)%[", at)
  local comment = text:find("^%-%-", at) ~= nil
  if comment then
    long = text:match("^%-%-%[(=*)%[", at)
  end
  if long then
    local _, stop = text:find("]" .. long .. "]", at, true)
    local whole = text:sub(at, stop)
    return stop, comment and " " .. whole:gsub("[^\n]+", "") or whole
  elseif comment then
    local _, stop = text:find("^[^\n]*", at)
    return stop, ""
  end
  local quote = text:match("^[\"']", at)
  if quote then
    local stop = at + 1
    while text:sub(stop, stop) ~= quote do
      stop = stop + (text:sub(stop, stop) == "\\" and 2 or 1)
    end
    return stop, text:sub(at, stop)
  end
  local _, stop = text:find("^\n *", at)
  return stop or at, stop and "\n" or text:sub(at, at)
end

--- A Lua source without comments and indentation, its lines where they were.
local function without_comments(text)
  local parts, at = {}, 1
  while at <= #text do
    local run = text:match("^[^%-%[\"'\n]+", at)
    if run then
      parts[#parts + 1] = run
      at = at + #run
    else
      local stop
      stop, parts[#parts + 1] = token(text, at)
      at = stop + 1
    end
  end
  return table.concat(parts)
end

--- How many of the texts have each run of SHARED bytes; those that only one has are left out.
local function count_shared(texts)
  local counts, last = {}, {}
  for index, text in ipairs(texts) do
    for at = 1, #text - SHARED + 1 do
      local bytes = text:sub(at, at + SHARED - 1)
      if last[bytes] ~= index then
        last[bytes] = index
        counts[bytes] = (counts[bytes] or 0) + 1
      end
    end
  end
  for bytes, count in pairs(counts) do
    if count == 1 then
      counts[bytes] = nil
    end
  end
  return counts
end

--- The best segment that begins in [first, last]: the one whose runs, each counted once, most texts have.
local function best_segment(all, first, last, counts)
  local best, best_at, score = -1, first, 0
  local inside = {}
  for at = first, last + SEGMENT - SHARED do
    local bytes = all:sub(at, at + SHARED - 1)
    local times = inside[bytes] or 0
    score = times == 0 and score + (counts[bytes] or 0) or score
    inside[bytes] = times + 1
    local begin = at - (SEGMENT - SHARED)
    if begin >= first then
      if score > best then
        best, best_at = score, begin
      end
      bytes = all:sub(begin, begin + SHARED - 1)
      inside[bytes] = inside[bytes] - 1
      score = inside[bytes] == 0 and score - (counts[bytes] or 0) or score
    end
  end
  return best, best_at
end

--- A dictionary for deflate: all texts are cut into as many stretches as it has segments, and the best segment of each
--- is taken, without regard to what those before it have. The best are the last, where deflate's distances are short.
--- The method is zstd's COVER.
local function dictionary_of(texts)
  local counts = count_shared(texts)
  local all = table.concat(texts)
  local count = DICTIONARY // SEGMENT
  local stretch = (#all - SEGMENT) // count
  local segments = {}
  for index = 0, count - 1 do
    local score, at = best_segment(all, 1 + index * stretch, (index + 1) * stretch, counts)
    local text = all:sub(at, at + SEGMENT - 1)
    for offset = 1, SEGMENT - SHARED + 1 do
      counts[text:sub(offset, offset + SHARED - 1)] = nil
    end
    segments[index + 1] = { score = score, index = index, text = text }
  end
  table.sort(segments, function(a, b)
    return a.score < b.score or a.score == b.score and a.index < b.index
  end)
  for index, segment in ipairs(segments) do
    segments[index] = segment.text
  end
  return table.concat(segments)
end

--- A module as it is embedded.
local function module_of(line)
  local name, path, file = line:match("^(%S+) (%S+) (.+)$")
  local source = read(file)
  local compiled = string.dump(assert(load(source, "@" .. path, "t")))
  local room = name:match("^[^.]*%.[^.]*")
  if not TEXT[room] then
    return { name = name, path = path, bytes = compiled }
  end
  local text = without_comments(source)
  local chunk = load(text, "@" .. path, "t")
  assert(chunk and string.dump(chunk) == compiled, file .. ": without its comments it is another program")
  return { name = name, path = path, bytes = text }
end

local modules = {}
for line in io.lines(list_path) do
  modules[#modules + 1] = module_of(line)
end
table.sort(modules, function(a, b)
  return a.name < b.name -- in the C locale, as engine/embedded.c searches them
end)

local texts = {}
for index, module in ipairs(modules) do
  texts[index] = module.bytes
  assert(index == 1 or module.name ~= modules[index - 1].name, module.name .. " is there twice")
end
local dictionary = dictionary_of(texts)

local output = assert(io.open(output_path .. ".new", "wb"))

--- Bytes as what stands between the braces of an array.
local function numbers(bytes)
  local parts = {}
  for at = 1, #bytes, 4096 do
    parts[#parts + 1] = bytes:sub(at, at + 4095):gsub(".", function(byte)
      return byte:byte() .. ","
    end)
  end
  return table.concat(parts)
end

--- Writes an array of the packed bytes; returns what a cir_blob is initialised with.
local function blob(name, bytes)
  local packed, sum = deflate(bytes, dictionary)
  output:write("static const unsigned char ", name, "[] = {", numbers(packed), "};\n")
  return ("{%s, %d, %d, %d}"):format(name, #packed, #bytes, sum)
end

output:write('/* Made by cmake/embed.lua. */\n#include "embedded.h"\n')
output:write("const unsigned char cir_embedded_dictionary[] = {", numbers(dictionary), "};\n")
output:write("const size_t cir_embedded_dictionary_size = ", #dictionary, ";\n")
local rows = {}
for index, module in ipairs(modules) do
  local row = '    {"%s", "%s", %s},\n'
  rows[index] = row:format(module.name, module.path, blob("m" .. index, module.bytes))
end
output:write("const cir_embedded cir_embedded_modules[] = {\n", table.concat(rows), "};\n")
output:write("const size_t cir_embedded_count = ", #modules, ";\n")
local guard = blob("guard", guard_path and read(guard_path) or "")
output:write("const cir_blob cir_embedded_guard = ", guard, ";\n")
local digest = ""
if guard_path then
  local pipe = assert(io.popen(("sha256sum < '%s'"):format((guard_path:gsub("'", "'\\''")))))
  digest = assert(pipe:read("a"):match("^%x+"))
  pipe:close()
end
output:write(('const char cir_embedded_guard_sha256[] = "%s";\n'):format(digest))
assert(output:close())
assert(os.rename(output_path .. ".new", output_path))
