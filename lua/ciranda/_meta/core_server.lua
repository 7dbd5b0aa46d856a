---@meta ciranda.core.server
--- The engine's HTTP server (engine/http_server.c, http_exchange*.c). Private: use ciranda.io.server.

---@class ciranda.core.server
local M = {}

---@class ciranda.core.server.Options
---@field max_body integer?         bytes; 64 MiB by default
---@field deadline_ms integer?      how long Lua may keep a client waiting; 60000 by default, 0 for ever
---@field idle_ms integer?          rounded up to seconds; 60000 by default
---@field max_connections integer?  4096 by default

---@class ciranda.core.server.Request
---@field method string
---@field target string             as the client wrote it
---@field version string            "1.0" or "1.1"
---@field headers string[][]        {name, value}, in order
---@field body string
---@field remote_address string
---@field remote_port integer
---@field local_address string
---@field local_port integer

---@class ciranda.core.Server
local Server = {}

--- Listen on a numeric address. Port 0 takes a free one.
---@param address string
---@param port integer
---@return integer? port
---@return { code: string, message: string }? err
function Server:listen(address, port) end

--- Cut every connection and stop. The callback is called when nothing is left.
---@param callback fun()?
---@return boolean called whether the callback will be called: not when the server is gone already
function Server:stop(callback) end

--- A request to be answered. Every method returns whether it was still there to be answered.
---@class ciranda.core.Exchange
local Exchange = {}

---@param status integer
---@param headers string[][]?
---@param body string?
---@param truncate_at integer? end the connection after so many bytes of the body
---@return boolean
function Exchange:respond(status, headers, body, truncate_at) end

--- Begin an answer whose body is written bit by bit; without a length it is sent in chunks.
---@param status integer
---@param headers string[][]?
---@param length integer?
---@return boolean
function Exchange:start(status, headers, length) end

--- One write at a time: the callback says that there is room again.
---@param data string
---@param callback fun(err: { code: string, message: string }?)
---@return boolean
function Exchange:write(data, callback) end

---@return boolean
function Exchange:finish() end

--- End the connection: the client reads an end of file.
---@return boolean
function Exchange:drop() end

--- Reset the connection.
---@return boolean
function Exchange:reset() end

--- Answer 101. The callback gets a descriptor, which is then the caller's, and what came after the request.
---@param headers string[][]
---@param callback fun(err: { code: string, message: string }?, fd: integer?, early: string?)
---@return boolean
function Exchange:upgrade(headers, callback) end

---@param options ciranda.core.server.Options
---@param on_request fun(exchange: ciranda.core.Exchange, request: ciranda.core.server.Request)
---@return ciranda.core.Server
function M.start(options, on_request) end

return M
