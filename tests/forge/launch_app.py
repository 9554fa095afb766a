"""A small app for the tests of launch: `launch_app.py WHAT` spawns two roles, then does what it is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial

from probes import Probe

from forge import launch
from forge.launch import Hosts, Stopping
from forge.mesh import Cluster, MeshConfig, RoleConfig, place


async def main(what: str, hosts: Hosts, stopping: Stopping) -> None:
    cfg = MeshConfig(device="cpu", debug=what == "debug")
    if what == "config":
        cfg.trainer = RoleConfig(procs=0)
    placement = place(cfg, torchrun_slots=hosts.slots_per_host, num_hosts=hosts.num_hosts, roles=("trainer",))
    async with Cluster(hosts, placement, debug=cfg.debug) as cluster:
        with stopping.at_once():
            trainer = await cluster.spawn("trainer", Probe)
            judge = await cluster.spawn("judge", Probe)
            ranks = list((await trainer.about.call()).values())
            orphan = await judge.start_subprocess.call_one()
        for rank in ranks:
            print("rank", rank["rank"], rank["pid"] == os.getpid(), rank["threads"], rank["torchrun"])
        print("ready", os.getpid(), orphan, *(rank["pid"] for rank in ranks), flush=True)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(cluster.watch())
            if what == "wait":
                await stopping.wait()
                print("checkpoint written", flush=True)
            elif what == "kill":
                os.kill(ranks[0]["pid"], signal.SIGKILL)
                await trainer.sleep.call(60)
            elif what == "remote":
                await judge.raise_error.call_one("mine")
            elif what == "local":
                raise ZeroDivisionError("nothing to divide by")
            watching.cancel()
    print("done", flush=True)


if __name__ == "__main__":
    launch.run(partial(main, sys.argv[1]), launch.bring_up())
