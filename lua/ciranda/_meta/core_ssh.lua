---@meta ciranda.core.ssh
--- SSH sessions on libssh2 (engine/ssh*.c). Private: use ciranda.ssh. Times are milliseconds, keys and blobs are bytes.
--- Errors are {code =, phase =, message =, reason =}.

---@class ciranda.core.ssh
---@field version string libssh2's
local M = {}

---@class ciranda.core.ssh.Operation
local Operation = {}

--- Its callback is told "cancelled", later. Giving up an `open` or an `authenticate` ends the session.
function Operation:cancel() end

---@class ciranda.core.ssh.OpenOptions
---@field address string?      numeric; one of address, descriptor and write is needed
---@field port integer?        22
---@field bind string?         numeric local address
---@field descriptor integer?  a connected stream socket, which is taken over
---@field write fun(data: string)?  carries the session's bytes; the next piece comes after session:written()
---@field drained fun()?       the input that session:feed said was full has been used up
---@field connect_ms integer?  deadlines of the phases; none by default
---@field banner_ms integer?
---@field kex_ms integer?
---@field methods { kex: string, hostkey: string?, cipher: string?, mac: string?, sign: string? } comma-separated

--- Connect, exchange identifications and keys. The host key is for the caller to verify, by session:host_key().
---@param options ciranda.core.ssh.OpenOptions
---@param callback fun(err: table?, session: ciranda.core.ssh.Session?)
---@return ciranda.core.ssh.Operation
---@return ciranda.core.ssh.Session session only for feed, feed_end and written before the callback
function M.open(options, callback) end

---@class ciranda.core.ssh.Key
local Key = {}

---@return string
function Key:type() end

--- The public key as servers know it.
---@return string
function Key:public() end

---@return string
function Key:comment() end

--- What belongs inside the signature's inner string, or nil when the key has no such algorithm.
---@param algorithm string "rsa-sha2-512", "rsa-sha2-256" or the key's type
---@param data string
---@return string?
function Key:sign(algorithm, data) end

--- Read and parse a private key on the thread pool.
---@param path string
---@param passphrase string?
---@param callback fun(err: table?, key: ciranda.core.ssh.Key?)
---@return { cancel: fun(self) } handle
function M.key_read(path, passphrase, callback) end

---@param text string
---@param passphrase string?
---@param callback fun(err: table?, key: ciranda.core.ssh.Key?)
---@return { cancel: fun(self) } handle
function M.key_parse(text, passphrase, callback) end

---@class ciranda.core.ssh.Session
local Session = {}

---@return string? type
---@return string? blob
function Session:host_key() end

--- What was agreed.
---@return { kex: string, hostkey: string, cipher: string, mac: string }?
function Session:methods() end

---@return string?
function Session:banner() end

---@class ciranda.core.ssh.AuthOptions
---@field user string
---@field key ciranda.core.ssh.Key?  or both of public and sign
---@field public string? what the server is shown; with a key: its certificate
---@field sign fun(algorithm: string, data: string, reply: fun(signature: string?, why: string?))?
---@field timeout integer?

--- After a failure with code "auth" another key may be tried.
---@param options ciranda.core.ssh.AuthOptions
---@param callback fun(err: table?)
---@return ciranda.core.ssh.Operation
function Session:authenticate(options, callback) end

--- The methods that the server offers: "publickey,password"; nil when the user needs none.
---@param user string
---@param timeout integer 0 for none
---@param callback fun(err: table?, methods: string?)
---@return ciranda.core.ssh.Operation
function Session:auth_methods(user, timeout, callback) end

---@class ciranda.core.ssh.ExecOptions
---@field command string?     one of command, subsystem and shell is needed
---@field subsystem string?
---@field shell boolean?
---@field env string[][]?     {{name, value}, ...}
---@field term string?        asks for a terminal
---@field columns integer?
---@field rows integer?
---@field window integer?     bytes the server may send before we have read any; 2 MiB
---@field timeout integer?

---@param options ciranda.core.ssh.ExecOptions
---@param callback fun(err: table?, channel: ciranda.core.ssh.Channel?, refused: string[]?) refused: names of variables
---@return ciranda.core.ssh.Operation
function Session:exec(options, callback) end

---@param options { host: string, port: integer, timeout: integer? }
---@param callback fun(err: table?, channel: ciranda.core.ssh.Channel?)
---@return ciranda.core.ssh.Operation
function Session:tunnel(options, callback) end

---@param interval integer 0 turns it off
---@param most integer? silent intervals that are asked about before the session is "lost"; 3
function Session:keepalive(interval, most) end

--- Called once, when the session ends.
---@param callback fun(err: table)
---@return boolean waits false when it has ended already
function Session:on_close(callback) end

---@return "opening"|"up"|"dead"
---@return table? err what it died of
function Session:status() end

---@return integer received
---@return integer sent
function Session:bytes() end

---@param reason string?
function Session:close(reason) end

--- Bytes that have come for a session opened with `write`.
---@param data string
---@return boolean room false: pause until `drained`
function Session:feed(data) end

function Session:feed_end() end

function Session:written() end

---@class ciranda.core.ssh.Channel
local Channel = {}

--- Stream is 1 (standard output) or 2 (standard error). No data and no error: the end of both.
---@param callback fun(err: table?, data: string?, stream: integer?)
---@return boolean open
function Channel:read_start(callback) end

function Channel:read_stop() end

--- Called once, when the server has told the end of the command, or the channel closes without that.
---@param callback fun(err: table?, code: integer?, signal: string?, message: string?)
---@return boolean waits false when the channel is closed
function Channel:on_exit(callback) end

---@param callback fun(err: table?)
---@return boolean waits
function Channel:on_close(callback) end

---@return integer? code
---@return string? signal
---@return string? message
function Channel:exit() end

---@return "open"|"ended"|"closed"
---@return table? err
function Channel:status() end

---@param data string
---@param callback fun(err: table?) when all of it is on its way
---@return boolean accepted
function Channel:write(data, callback) end

--- End of standard input, after what is being written.
function Channel:shutdown() end

---@param name string without SIG
---@return boolean sent
function Channel:signal(name) end

---@param columns integer
---@param rows integer
function Channel:resize(columns, rows) end

---@param timeout integer? until the server's side counts as left open
function Channel:close(timeout) end

return M
