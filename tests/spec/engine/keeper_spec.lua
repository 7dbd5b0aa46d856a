local keeper = require("ciranda.core.keeper")

describe("ciranda.core.keeper", function()
  it("reaps the child it is told, never any", function()
    -- As a process id of 32 bits these are -1 and 0, which to waitpid mean whichever child has ended.
    for _, pid in ipairs { (1 << 32) - 1, 1 << 32, 0, -1, 1 } do
      local ok, err = pcall(keeper.reap, pid)
      assert.is_false(ok, tostring(pid))
      assert.matches("process id", err)
    end
  end)
end)
