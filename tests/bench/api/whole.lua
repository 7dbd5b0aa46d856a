--- The list by a script: whole messages, of which name and state are printed.
for _, resource in ipairs(require("ciranda.gcp.tpu").connect():list_queued_resources()) do
  io.write(resource.name, "\t", resource.state.state, "\n")
end
