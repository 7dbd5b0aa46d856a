"""Random meshes placed by jax's own mesh_utils, written as a Lua table for walk.lua to place again.

    python walk.py COUNT SEED OUTPUT

Devices are stand-ins with the attributes mesh_utils reads; nothing touches an accelerator. At least a quarter of the
cases is refused by jax, and a refusal is compared by the exception's type and its whole text.
"""

import random
import sys

import jax
import numpy
from jax._src import mesh_utils

MEGACORE = ["TPU v4", "TPU v4 lite", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite"]
CORES = ["TPU7x", "TPU7", "TPU8i"]
OLD = ["TPU v2", "TPU v3"]
FLAT = ["TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v2", "TPU v3"]
OTHERS = [("cpu", "cpu"), ("gpu", "NVIDIA H100")]
LARGEST = 1024


class Device:
  """What mesh_utils reads of a device; printed as jaxlib prints one."""

  def __init__(self, id, platform, device_kind, process_index, coords, core_on_chip, slice_index):
    self.id = id
    self.platform = platform
    self.device_kind = device_kind
    self.process_index = process_index
    self.core_on_chip = core_on_chip
    if coords is not None:
      self.coords = coords
    if slice_index is not None:
      self.slice_index = slice_index

  def __repr__(self):
    if self.platform != "tpu":
      return f"{'Cpu' if self.platform == 'cpu' else 'Cuda'}Device(id={self.id})"
    x, y, z = self.coords
    return (
        f"TpuDevice(id={self.id}, process_index={self.process_index}, coords=({x},{y},{z}), "
        f"core_on_chip={self.core_on_chip})"
    )


def grid(kind, platform, dims, cores, slices, has_slice=True):
  """Devices of whole slices, host by host, numbered with x fastest."""
  width, height, depth = dims
  host_x, host_y = min(width, 2), min(height, 2)
  across, down = width // host_x, height // host_y
  out = []
  for slice_index in range(slices):
    for hz in range(depth):
      for hy in range(down):
        for hx in range(across):
          process = hx + across * (hy + down * (hz + depth * slice_index))
          for dy in range(host_y):
            for dx in range(host_x):
              for core in range(cores):
                x, y = hx * host_x + dx, hy * host_y + dy
                id = core + cores * (x + width * (y + height * (hz + depth * slice_index)))
                out.append(
                    Device(id, platform, kind, process, (x, y, hz), core, slice_index if has_slice else None)
                )
  return out


def even(size):
  return size == 1 or size % 2 == 0


def random_dims(rng, kind):
  while True:
    pool = rng.choice([[1, 2, 4, 8, 16], [1, 2, 4, 6, 10, 12, 14, 20, 28], [2, 4], [1, 2]])
    dims = [rng.choice(pool), rng.choice(pool), 1 if kind in FLAT else rng.choice(pool + [1, 3, 5])]
    if dims[0] * dims[1] * dims[2] <= LARGEST and even(dims[0]) and even(dims[1]):
      return tuple(dims)


def random_factors(rng, number, axes):
  shape = [1] * axes
  rest, prime = number, 2
  while rest > 1:
    while rest % prime == 0:
      shape[rng.randrange(axes)] *= prime
      rest //= prime
    prime += 1
  return shape


def torus_shape(rng, dims):
  """A shape that needs no axis to be split: each physical axis goes to one logical axis."""
  axes = rng.randint(1, 4)
  shape = [1] * axes
  for size in dims:
    shape[rng.randrange(axes)] *= size
  return shape


def random_shape(rng, dims, cores):
  number = dims[0] * dims[1] * dims[2] * cores
  if rng.random() < 0.55:
    return torus_shape(rng, list(dims) + ([cores] if rng.random() < 0.7 else []))
  return random_factors(rng, number, rng.randint(1, 5))


def spoil_devices(rng, devices):
  """A set that is no longer a whole cuboid, or whose devices are not what they should be."""
  devices = list(devices)
  how = rng.choice(["drop", "duplicate", "core", "kind", "height"])
  at = rng.randrange(len(devices))
  old = devices[at]
  coords = getattr(old, "coords", None)
  if how == "drop" and len(devices) > 1:
    del devices[at]
  elif how == "duplicate" and len(devices) > 1:
    devices[at] = devices[at - 1]
  elif how == "core":
    devices[at] = Device(old.id, old.platform, old.device_kind, old.process_index, coords, 1,
                         getattr(old, "slice_index", None))
  elif how == "kind":
    kind = rng.choice(MEGACORE + CORES + OLD)
    devices[at] = Device(old.id, old.platform, kind, old.process_index, coords, old.core_on_chip,
                         getattr(old, "slice_index", None))
  else:
    x, y, z = coords
    devices[at] = Device(old.id, old.platform, old.device_kind, old.process_index, (x, y, z + 1), old.core_on_chip,
                         getattr(old, "slice_index", None))
  return devices


def spoil_shape(rng, shape):
  shape = list(shape)
  at = rng.randrange(len(shape))
  shape[at] = rng.choice([shape[at] + 1, shape[at] * 2, 0, -shape[at], "many", "2.5", shape[at] + 0.5, f" {shape[at]} "])
  return shape


def make_case(rng):
  """One random case: (function, arguments for jax, the same for Lua)."""
  platform, kind = "tpu", rng.choice(MEGACORE + CORES + CORES + OLD)
  if rng.random() < 0.04:
    platform, kind = rng.choice(OTHERS)
  dims = random_dims(rng, kind)
  cores = 2 if kind in CORES + OLD and rng.random() < 0.85 else 1
  if kind in MEGACORE and rng.random() < 0.06:
    cores = 2
  hybrid = rng.random() < 0.3
  contiguous = not hybrid and rng.random() < 0.12
  if contiguous and rng.random() < 0.7:
    dims, cores = rng.choice([(2, 2, 1), (2, 2, 4), (4, 4, 4), (4, 8, 8), (8, 8, 8)]), 1
  slices = rng.choice([1, 2, 2, 3, 4, 6]) if hybrid else 1
  while hybrid and dims[0] * dims[1] * dims[2] > 128:
    dims = random_dims(rng, kind)
  has_slice = hybrid and rng.random() > 0.05
  devices = grid(kind, platform, dims, cores, slices, has_slice)
  regular = True

  shape = random_shape(rng, dims, cores)
  if contiguous and rng.random() < 0.7:
    known = mesh_utils._TRANSPOSE_TRICKS.get(dims, {})
    if known:
      shape = list(rng.choice(list(known)))
      shape.insert(rng.randrange(len(shape) + 1), 1)
  if rng.random() < 0.12:
    shape = spoil_shape(rng, shape)
  if len(devices) <= 64 and rng.random() < 0.3:
    change = rng.random()
    regular = False
    if change < 0.5:
      devices = spoil_devices(rng, devices)
    elif change < 0.7:
      rng.shuffle(devices)
    elif change < 0.85:
      devices = [
          Device(d.id, d.platform, d.device_kind, d.process_index, tuple(c + 2 for c in d.coords), d.core_on_chip,
                 getattr(d, "slice_index", None)) for d in devices
      ]
    else:
      devices = devices[::-1]

  options = {"allow_split_physical_axes": rng.random() < 0.4}
  if not hybrid:
    if contiguous:
      options["contiguous_submeshes"] = True
    return "create_device_mesh", (tuple(shape),), devices, options, (kind, platform, dims, cores, 1, False), regular

  by_process = rng.random() < 0.1
  if by_process:
    options["process_is_granule"] = True
    if all(isinstance(s, int) for s in shape):
      shape = [1, min(dims[0], 2), min(dims[1], 2) * cores]
  if rng.random() < 0.3:
    options["should_sort_granules_by_key"] = False
  granules = len({getattr(d, "process_index" if by_process else "slice_index", 0) for d in devices})
  dcn = random_factors(rng, granules, len(shape) if rng.random() < 0.85 else rng.randint(1, 4))
  if rng.random() < 0.1:
    dcn[rng.randrange(len(dcn))] += 1
  return ("create_hybrid_device_mesh", (tuple(shape), tuple(dcn)), devices, options,
          (kind, platform, dims, cores, slices, has_slice), regular)


def make_physical_case(rng):
  """The physical array by itself: v2 and v3 never get so far in create_device_mesh."""
  kind = rng.choice(OLD + CORES + MEGACORE)
  dims = random_dims(rng, kind)
  cores = rng.choice([1, 2])
  devices = grid(kind, "tpu", dims, cores, 1, False)
  regular = True
  if len(devices) <= 64 and rng.random() < 0.4:
    devices, regular = spoil_devices(rng, devices), False
  return "physical", (), devices, {}, (kind, "tpu", dims, cores, 1, False), regular


def run(function, arguments, devices, options):
  """What jax answers: (array, None) or (None, exception)."""
  try:
    if function == "physical":
      return mesh_utils._get_physical_tpu_mesh(devices), None
    return getattr(mesh_utils, function)(*arguments, devices, **options), None
  except Exception as error:  # every refusal is part of the comparison
    return None, error


def lua(value):
  """A Python value as Lua source."""
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, str):
    # A newline may stand after the backslash; nothing else that repr() gives needs more.
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
  if isinstance(value, (list, tuple)):
    return "{" + ",".join(lua(item) for item in value) + "}"
  if isinstance(value, dict):
    return "{" + ",".join(f"{key}={lua(item)}" for key, item in value.items() if item is not None) + "}"
  return repr(value)


def record(function, arguments, devices, options, described, regular, array, error):
  kind, platform, dims, cores, slices, has_slice = described
  case = {"fn": function, "shapes": list(arguments), "options": options}
  if regular:
    case["grid"] = {
        "kind": kind,
        "platform": platform,
        "topology": dims,
        "cores": cores,
        "slices": slices,
        "slice_index": has_slice,
    }
  else:
    case["list"] = [
        {
            "id": d.id,
            "kind": d.device_kind,
            "platform": d.platform,
            "coords": d.coords,
            "core": d.core_on_chip,
            "process_index": d.process_index,
            "slice_index": getattr(d, "slice_index", None),
        }
        for d in devices
    ]
  if error is None:
    case["shape"] = list(array.shape)
    case["ids"] = [d.id for d in array.flat]
  else:
    case["exception"] = type(error).__name__
    case["message"] = str(error)
  return case


def main():
  count, seed, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
  rng = random.Random(seed)
  cases, refusals = [], 0
  while len(cases) < count:
    made = make_physical_case(rng) if rng.random() < 0.05 else make_case(rng)
    function, arguments, devices, options, described, regular = made
    array, error = run(function, arguments, devices, options)
    # Keep a quarter of refusals, and half of meshes, whatever the dice say.
    left = count - len(cases)
    if error is None and count // 4 + 1 - refusals >= left:
      continue
    if error is not None and refusals >= count // 2:
      continue
    refusals += error is not None
    cases.append(record(function, arguments, devices, options, described, regular, array, error))
  with open(output, "w", encoding="utf-8") as file:
    file.write("local cases = {}\n")
    for index, case in enumerate(cases):
      # One function a case: a single table constructor would exceed Lua's limit of constants.
      file.write(f"cases[{index + 1}] = function() return {lua(case)} end\n")
    file.write(
        f"return {{jax={lua(jax.__version__)}, numpy={lua(numpy.__version__)}, seed={seed}, refusals={refusals}, "
        "cases=cases}\n"
    )


main()
