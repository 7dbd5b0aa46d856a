std = "lua54"
max_line_length = 120
self = false
files["tests/spec"] = { std = "+busted" }
files["lua/ciranda/_meta"] = { ignore = { "1", "2" } }
