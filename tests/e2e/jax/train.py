#!/usr/bin/env python3
"""A training job of JAX and Orbax on CPU: one process a worker, parameters sharded over all of them.

It is the loop that Orbax's documentation recommends: save() at every step, and when the coordination service
has agreed on a step to stop at, wait for the save and leave. The loss of a step depends on nothing but the
steps before it, so a job that was stopped and resumed must print what one that never stopped prints.
"""

import argparse
import glob
import os
import sys
import time

DEVICES = 8  # in all, however many processes share them
WIDTH = 64
RATE = 0.05

VARIANTS = {
    "behaves": "saves at the agreed step and leaves",
    "no-policy": "leaves at the agreed step with status 0, but no policy lets the step be saved",
    "slow-saver": "takes --save-seconds to write its part of a checkpoint",
    "ignores-term": "never asks whether it should stop",
}


def parse_arguments():
    env = os.environ
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="variants: " + "; ".join("%s %s" % pair for pair in VARIANTS.items()),
    )
    parser.add_argument("--checkpoint_dir", help="shared by all processes; without it nothing is saved")
    parser.add_argument("--coordinator", help="HOST:PORT where process 0 listens")
    parser.add_argument("--rank", type=int, default=int(env.get("CIRANDA_PROCESS_ID", "0")))
    parser.add_argument("--world", type=int, default=int(env.get("CIRANDA_NUM_WORKERS", "1")))
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--step-time", type=float, default=0.1, help="seconds a step takes at least")
    parser.add_argument("--save-interval", type=int, default=1000)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="behaves")
    parser.add_argument("--save-seconds", type=float, default=60)
    parser.add_argument("--exit-status", type=int, default=0, help="status after a stop that saved")
    return parser.parse_args()


def say(text):
    print(text, flush=True)


def hold_accelerator():
    """Opens the worker's accelerator, as libtpu would: the platform signals who holds it."""
    prefixes = ["/dev/accel", "/dev/vfio/"]
    words = os.environ.get("CIRANDA_GUARD_OPTIONS", "").split()
    if "--devices" in words:
        prefixes = words[words.index("--devices") + 1].split(",")
    paths = sorted(path for prefix in prefixes for path in glob.glob(prefix + "[0-9]*"))
    return [os.open(path, os.O_RDWR) for path in paths]


def make_manager(options, ocp):
    policies = ocp.checkpoint_managers
    settings = {"save_interval_steps": options.save_interval, "cleanup_tmp_directories": True}
    if options.variant in ("no-policy", "ignores-term"):
        settings["save_decision_policy"] = policies.FixedIntervalPolicy(options.save_interval)

    if options.variant == "slow-saver":
        save, saves = ocp.StandardCheckpointHandler.async_save, []

        async def slow_save(*args, **kwargs):
            futures = await save(*args, **kwargs)
            saves.append(time.time())
            if len(saves) > 1:  # the first is that of step 0, before anything is asked of it
                time.sleep(options.save_seconds)
            return futures

        ocp.StandardCheckpointHandler.async_save = slow_save
    return ocp.CheckpointManager(
        options.checkpoint_dir, options=ocp.CheckpointManagerOptions(**settings)
    )


def main():
    options = parse_arguments()
    held = hold_accelerator()
    import jax

    # First of all: until now SIGTERM kills, and from now on the coordination service takes it.
    if options.world > 1:
        jax.distributed.initialize(
            options.coordinator, options.world, options.rank, cluster_detection_method="deactivate"
        )
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    if options.rank == 0:
        say("jax %s, orbax-checkpoint %s" % (jax.__version__, ocp.__version__))
    devices = jax.devices()
    if len(devices) != DEVICES:
        sys.exit("%d devices, not %d" % (len(devices), DEVICES))
    say("process %d of %d, pid %d, %d accelerator files" % (options.rank, options.world, os.getpid(), len(held)))

    # Slices outside, chips inside: the batch over both, the parameters over the chips of a slice.
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, DEVICES // 2), ("slice", "chip"))
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("chip"))
    batch = NamedSharding(mesh, PartitionSpec(("slice", "chip")))

    @jax.jit
    def train(weights, step):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(7), step))
        truth = jax.random.normal(jax.random.key(8), (WIDTH, WIDTH))
        x = jax.lax.with_sharding_constraint(jax.random.normal(keys[0], (WIDTH * 2, WIDTH)), batch)
        noise = jax.random.normal(keys[1], (WIDTH * 2, WIDTH)) * 0.01

        def loss_of(w):
            return jnp.mean((x @ w - x @ truth - noise) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        weights = jax.lax.with_sharding_constraint(weights - RATE * WIDTH * gradient, rows)
        return weights, jax.lax.with_sharding_constraint(loss, whole)

    weights = jax.jit(lambda: jnp.zeros((WIDTH, WIDTH)), out_shardings=rows)()
    manager = make_manager(options, ocp) if options.checkpoint_dir else None
    first = 0
    last = manager.latest_step() if manager else None
    if last is not None:
        like = {"weights": jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=rows)}
        weights = manager.restore(last, args=ocp.args.StandardRestore(like))["weights"]
        first = last + 1
        say("restored step %d from %s" % (last, options.checkpoint_dir))

    for step in range(first, options.steps):
        began = time.monotonic()
        weights, loss = train(weights, step)
        loss = float(loss)
        remaining = options.step_time - (time.monotonic() - began)
        if remaining > 0:
            time.sleep(remaining)
        say("completed step: %d, seconds: %.3f, loss: %.9g" % (step, time.monotonic() - began, loss))
        if not manager:
            continue
        manager.save(step, args=ocp.args.StandardSave({"weights": weights}))
        if options.variant != "ignores-term" and manager.reached_preemption(step):
            say("Reached preemption sync point, step=%d" % step)
            manager.wait_until_finished()
            manager.close()
            jax.distributed.shutdown()
            sys.exit(options.exit_status)
    if manager:
        manager.wait_until_finished()
        manager.close()
    say("training finished at step %d" % (options.steps - 1))


if __name__ == "__main__":
    main()
