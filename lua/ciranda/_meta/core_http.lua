---@meta ciranda.core.http
--- The engine's HTTP client (engine/http_client.c). Private: use ciranda.io.http. Times are milliseconds.

---@class ciranda.core.http
local M = {}

---@class ciranda.core.http.Options
---@field url string                   http:// or https://, without white space
---@field method string?               capitals; GET, or POST when there is a body
---@field headers string[]?            "Name: value", without line breaks
---@field body string?
---@field body_file string?            path of a regular file, read on the thread pool
---@field body_offset integer?         bytes, 0 by default
---@field body_length integer?         bytes, to the end of the file by default
---@field timeout_ms integer?          for everything; none by default
---@field connect_timeout_ms integer?  to resolve and connect; libcurl's 300 s by default
---@field low_speed_ms integer?        rounded up to seconds: give up when slower than low_speed_limit for so long
---@field low_speed_limit integer?     bytes a second; 1 by default when low_speed_ms is given
---@field http2 boolean?               false: HTTP/1.1 only
---@field ca_file string?
---@field proxy string?                none by default, whatever the environment says
---@field unix_socket string?
---@field max_body integer?            bytes of a collected body; 64 MiB by default
---@field max_head integer?            bytes of all status lines, headers and trailers of an answer; 256 KiB by default
---@field accept_encoding string?
---@field once boolean?                an answer that does not come on a kept connection is an error, not a second try
---@field on_response fun(status: integer, headers: string[][])?  once, before any data
---@field on_data fun(chunk: string)?  takes the body, which is then not collected

---@class ciranda.core.http.Response
---@field status integer
---@field headers string[][]           {name, value}, in order
---@field body string?                 nil with on_data
---@field received integer             body bytes
---@field http_version string          "1.0", "1.1", "2" or "3"
---@field effective_ip string
---@field time_ms integer
---@field reused boolean

---@class ciranda.core.http.Error
---@field code string                  a code of ciranda.io.error
---@field message string               libcurl's text, or ours; never headers or a query
---@field curl string?                 libcurl's general text for the failure
---@field phase "resolve"|"connect"|"tls"|"answer"|"headers"|"body"?  how far it got
---@field received integer
---@field status integer?              when the head had come

---@class ciranda.core.http.Handle
local Handle = {}

--- The callback gets code "cancelled". Nothing happens when the request is over.
function Handle:cancel() end

--- No on_data until `resume`; the connection is not read meanwhile.
function Handle:pause() end

function Handle:resume() end

--- Start a request. The callback is called once, on a later turn. Raises a misuse.
---@param options ciranda.core.http.Options
---@param callback fun(err: ciranda.core.http.Error?, response: ciranda.core.http.Response?)
---@return ciranda.core.http.Handle
function M.request(options, callback) end

--- Connect, through TLS for https://, and send nothing. Of the options `url`, `timeout_ms`, `connect_timeout_ms`,
--- `ca_file`, `proxy` and `unix_socket` count. Each connection has a multi handle of libcurl's own (some 35 KB).
---@param options ciranda.core.http.Options
---@param callback fun(err: ciranda.core.http.Error?, socket: ciranda.core.http.Socket?)
---@return ciranda.core.http.Handle
function M.connect(options, callback) end

--- A connection, engine/http_socket.c. One that nobody holds is closed.
---@class ciranda.core.http.Socket
local Socket = {}

--- Read: data, then once neither (the end) or an error.
---@param callback fun(err: table?, data: string?)
---@return boolean open
function Socket:read_start(callback) end

--- No callback until it is started again.
function Socket:read_stop() end

--- Send. Raises while the last write is under way.
---@param data string
---@param callback fun(err: table?) later: all of it is with the kernel, or code "cancelled" after `close`
---@return boolean open
function Socket:write(data, callback) end

function Socket:close() end

return M
