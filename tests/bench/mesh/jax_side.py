"""jax's own placing of 256 slices of 16x16 chips: CPU seconds of each call, and the ids it gives.

    python jax_side.py REPEATS OUTPUT

Import and the making of the devices are not timed. Prints one line a mesh: name, median seconds.
"""

import statistics
import sys
import time

import jax
import numpy
from jax.experimental import mesh_utils


class Device:
  __slots__ = ("id", "platform", "device_kind", "process_index", "coords", "core_on_chip", "slice_index")

  def __init__(self, id, process_index, coords, slice_index):
    self.id = id
    self.platform = "tpu"
    self.device_kind = "TPU v5 lite"
    self.process_index = process_index
    self.coords = coords
    self.core_on_chip = 0
    self.slice_index = slice_index


def devices(slices, width):
  out = []
  for index in range(slices):
    for hy in range(0, width, 2):
      for hx in range(0, width, 2):
        for y in (hy, hy + 1):
          for x in (hx, hx + 1):
            process = hx // 2 + width // 2 * (hy // 2) + width * width // 4 * index
            out.append(Device(x + width * (y + width * index), process, (x, y, 0), index))
  return out


def main():
  repeats, output = int(sys.argv[1]), sys.argv[2]
  listed = devices(256, 16)
  with open(output, "w", encoding="ascii") as file:
    for name, ici, dcn in (("ring", (1, 256, 1), (256, 1, 1)), ("square", (1, 16, 16), (256, 1, 1))):
      times = []
      for _ in range(repeats):
        start = time.process_time()
        mesh = mesh_utils.create_hybrid_device_mesh(ici, dcn, listed)
        times.append(time.process_time() - start)
      print(name, repr(statistics.median(times)))
      file.write(" ".join(str(device.id) for device in mesh.flat) + "\n")
  print("versions", jax.__version__, numpy.__version__, sys.version.split()[0])


main()
