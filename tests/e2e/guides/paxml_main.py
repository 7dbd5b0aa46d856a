"""Stands for paxml/main.py with the flags of the Autocheckpoint guide, on one TPU VM.

With --jax_fully_async_checkpoint=1 a SIGTERM has the next step saved; --exit_after_ondemand_checkpoint=1 then ends the
process, with 1, as Pax does. Without the first flag SIGTERM ends it at once; without the second it trains on.
"""

import glob
import os
import signal
import sys
import time


def main():
    flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
    held = [os.open(path, os.O_RDWR) for path in glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")]
    signalled = []
    if flags.get("jax_fully_async_checkpoint") == "1":
        signal.signal(signal.SIGTERM, lambda number, frame: signalled.append(number))
    directory = os.path.join(flags["job_log_dir"], "checkpoints")
    os.umask(0)
    os.makedirs(directory, exist_ok=True)
    saved = sorted(int(name.split("_")[1]) for name in os.listdir(directory))
    step = saved[-1] + 1 if saved else 0
    print("%s on %d chips, from step %d" % (flags["exp"], len(held), step), flush=True)
    while True:
        time.sleep(0.1)
        print("completed step: %d" % step, flush=True)
        if signalled:
            signalled.clear()
            os.mkdir(os.path.join(directory, "checkpoint_%08d" % step))
            print("saved step %d" % step, flush=True)
            if flags.get("exit_after_ondemand_checkpoint") == "1":
                sys.exit(1)
        step += 1


if __name__ == "__main__":
    main()
