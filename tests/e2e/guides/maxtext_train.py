"""Stands for `python3 -m MaxText.train CONFIG name=value...` with the names that the guides use.

It finds out where it is as JAX does on a TPU, from the metadata server's tpu-env, refuses a mesh that does not fit the
slices, holds the worker's chips, and trains with the stand-in trainer beside it.
"""

import glob
import os
import sys
import urllib.request

from MaxText import trainer

NAMES = {
    "run_name",
    "dcn_data_parallelism",
    "ici_fsdp_parallelism",
    "steps",
    "save_period",
    "base_output_directory",
    "enable_autocheckpoint",
}


def read_tpu_env():
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(
        "http://%s/computeMetadata/v1/instance/attributes/tpu-env" % host, headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: value.strip().strip("'") for name, value in (line.split(":", 1) for line in lines if line)}


def product(text):
    result = 1
    for number in text.split(","):
        result *= int(number)
    return result


def count_starts(directory, rank):
    """How often this worker has been started: all of them as often, since one alone cannot train."""
    path = os.path.join(directory, "starts-%d" % rank)
    with open(path, "a") as file:
        file.write("x")
    return os.path.getsize(path)


def main():
    if not os.path.exists(sys.argv[1]):
        sys.exit("there is no configuration %s" % sys.argv[1])
    settings = dict(word.split("=", 1) for word in sys.argv[2:])
    unknown = set(settings) - NAMES
    if unknown:
        sys.exit("Key %s was passed at the command line but isn't in config." % sorted(unknown)[0])
    env = read_tpu_env()
    slices, own = int(env.get("MEGASCALE_NUM_SLICES", "1")), int(env.get("MEGASCALE_SLICE_ID", "0"))
    hosts = product(env["TPU_PROCESS_BOUNDS"])
    chips = hosts * product(env["TPU_CHIPS_PER_PROCESS_BOUNDS"])
    dcn, ici = int(settings["dcn_data_parallelism"]), int(settings["ici_fsdp_parallelism"])
    if (dcn, ici) != (slices, chips):
        sys.exit("the mesh is %d slices of %d, the devices are %d slices of %d" % (dcn, ici, slices, chips))
    held = [os.open(path, os.O_RDWR) for path in glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")]
    with open(os.path.join(os.path.dirname(__file__), "buckets")) as file:
        bucket = settings["base_output_directory"].replace("gs://", file.read().strip() + "/")
    directory = os.path.join(bucket, settings["run_name"], "checkpoints")
    os.umask(0)
    os.makedirs(directory, exist_ok=True)
    rank, world = own * hosts + int(env["WORKER_ID"]), slices * hosts
    print("%d devices in %d slices, %d of them here" % (slices * chips, slices, len(held)), flush=True)
    autocheckpoint = settings.get("enable_autocheckpoint", "true") == "true"
    sys.argv[1:] = [
        "--checkpoint_dir=" + directory,
        "--steps=" + settings["steps"],
        "--save-every=" + settings["save_period"],
        "--step-time=0.1",
        "--rank=%d" % rank,
        "--world=%d" % world,
        "--attempt=%d" % count_starts(directory, rank),
        "--variant=" + ("behaves" if autocheckpoint else "exits-0-without-save"),
    ]
    trainer.main()


if __name__ == "__main__":
    main()
