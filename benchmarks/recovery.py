"""What a failure and a change of size cost: torchrun and ours in turn, the same model, on this machine.

Seconds from the event to the next finished optimizer step of the survivors, or of their successors:

worker_in_place     one of two workers is killed; ours is an elastic.run script, whose survivor stays
worker_unmodified   the same with the same plain DDP script on both sides
cold_start          from the start of the command to the first step of that plain script
node                agent and worker of one of three nodes (at least two) are killed
node_sigterm        the agent of one of three nodes gets SIGTERM
scale_up            a third node joins two: from the request to the first step of all three
store_host_lost     the node of rank 0 is killed, which holds the store (torchrun: and its rendezvous)
silent_host         every process of a node is stopped, as by a machine that hangs; includes the heartbeat
coordinator_lost    the longest pause of training around the kill of the coordinator; torchrun has no such process
full_world_*        until as many workers as before train again; the script spends 2 s on an import, ours with --preload
joiner_1g_*         a worker with 1 GiB of state joins: its sync, and how long the others stood still

A torchrun try that has not recovered within 120 s counts as 120 s and in the figure `torchrun_unrecovered`. With
--quick this holds for one node that has not restarted its workers within 45 s: it takes 5 to 25 s, or hangs. Ours is an
error then. Torchrun starts no lost agent anew, so that there is no full_world_node of it. Its nodes run with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: by default a node that joins hangs for ever in torch 2.13.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _harness import Result, options
from _recovery_jobs import LIMIT, NotRecovered, Ours, Torchrun, pss_mb, stop_whole_node
from _recovery_scripts import write_scripts

from elastic_runtime.processes import tree

RATIOS = ("worker_in_place", "worker_unmodified", "node", "node_sigterm", "scale_up", "cold_start")
_HUNG = 45.0
"""Seconds after which torchrun on one node is taken to hang, with --quick."""
_AROUND = 1.5
"""Seconds before and after the coordinator's kill in which pauses are looked for."""


class Recovery:
    """All scenarios, each for one side."""

    def __init__(self, base: Path, *, hung: float = LIMIT) -> None:
        """Work in `base`. A torchrun on one node is given `hung` seconds to restart its workers."""
        self._hung = hung
        self.result = Result("recovery", rival_name="torchrun", ratios=RATIOS)
        self.result.figures["torchrun_unrecovered"] = 0
        self._samples: dict[str, list[float]] = {}
        self._base = base
        self._scripts = write_scripts(base)
        self._number = 0

    def repeat(self) -> None:
        """Do everything once."""
        for scenario in (
            self.torchrun_worker, self.ours_unmodified, self.ours_in_place,
            self.torchrun_nodes, self.ours_nodes,
            self.torchrun_slow, self.ours_slow_unmodified, self.ours_slow_in_place,
            self.ours_gibibyte,
        ):  # fmt: skip
            began = time.monotonic()
            scenario()
            sys.stderr.write(f"{scenario.__name__}: done in {time.monotonic() - began:.0f} s\n")

    def finish(self) -> None:
        """Make the figures that are no times of both sides."""
        for name, values in self._samples.items():
            self.result.figures[name] = statistics.median(values)
        lives = statistics.mean(self._samples["torchrun_lives_without_store_host"])
        self.result.notes["store_host_lost"] = f"lives in {lives:.0%} of tries" if lives else "dies"

    def _torchrun(self) -> Torchrun:
        self._number += 1
        return Torchrun(self._base, f"torchrun-{self._number}")

    def _ours(self) -> Ours:
        self._number += 1
        return Ours(self._base, f"ours-{self._number}")

    def _figure(self, name: str, value: float) -> None:
        self._samples.setdefault(name, []).append(value)

    def _rival(self, measure: Callable[[], float], *names: str) -> bool:
        """Add torchrun's seconds; return False if it did not recover."""
        try:
            seconds, recovered = measure(), True
        except NotRecovered as error:
            sys.stderr.write(f"torchrun, {', '.join(names)}: {str(error).splitlines()[0]}\n")
            self.result.figures["torchrun_unrecovered"] += 1
            seconds, recovered = LIMIT, False
        for name in names:
            self.result.add(name, rival=seconds)
        return recovered

    # --- one worker of two ---------------------------------------------------------------------------------------

    def torchrun_worker(self) -> None:
        """Torchrun: one node with two workers, one of which is killed."""
        with self._torchrun() as job:
            started = job.one_node(self._scripts["plain"], 2)
            self.result.add("cold_start", rival=job.first_step(2).time - started)
            job.steady(2)
            event = _kill(job.pids()[1])
            self._rival(
                lambda: job.next_step(event, "worker killed", limit=self._hung),
                "worker_in_place",
                "worker_unmodified",
            )

    def ours_unmodified(self) -> None:
        """Ours: the same script, the same kill."""
        with self._ours() as job:
            started = job.run(self._scripts["plain"], "--nproc-per-node=2", "--preload=torch.nn.parallel")
            self.result.add("cold_start", ours=job.first_step(2).time - started)
            job.steady(2)
            event = _kill(job.pids()[1])
            self.result.add("worker_unmodified", ours=job.next_step(event, "worker killed"))

    def ours_in_place(self) -> None:
        """Ours: the same kill, the survivor stays."""
        with self._ours() as job:
            job.run(self._scripts["in_place"], "--nodes=1:2")
            job.steady(2)
            event = _kill(job.pids()[1])
            self.result.add("worker_in_place", ours=job.next_step(event, "worker killed"))

    # --- nodes ---------------------------------------------------------------------------------------------------

    def torchrun_nodes(self) -> None:
        """Torchrun: of three nodes one is killed, another joins, one gets SIGTERM, and the first is killed."""
        script = self._scripts["plain"]
        job = self._nodes_of_torchrun(3)
        try:
            victim = job.agents[2]
            event = _kill(victim.pid, job.worker_of(victim))
            recovered = self._rival(lambda: job.next_step(event, "node killed"), "node")
            job = self._with_nodes(job, 2, recovered)
            event = time.time()
            job.node(script, "2:3")
            recovered = self._rival(lambda: job.next_step(event, "third node joins", world=3), "scale_up")
            job = self._with_nodes(job, 3, recovered)
            event = _kill(job.agents[-1].pid, number=signal.SIGTERM)
            recovered = self._rival(lambda: job.next_step(event, "SIGTERM to an agent"), "node_sigterm")
            job = self._with_nodes(job, 2, recovered)
            _kill(job.agents[0].pid, job.worker_of(job.agents[0]))
            self._figure("torchrun_lives_without_store_host", float(_lives(job)))
        finally:
            job.end()

    def _with_nodes(self, job: Torchrun, count: int, recovered: bool) -> Torchrun:
        """Return the job once `count` nodes of it train; a new one if it did not recover, or not for long."""
        if recovered:
            with contextlib.suppress(NotRecovered):
                job.steady(count)
                return job
        job.end()
        return self._nodes_of_torchrun(count)

    def _nodes_of_torchrun(self, count: int) -> Torchrun:
        job = self._torchrun()
        try:
            for _ in range(count):
                job.node(self._scripts["plain"], "2:3")
            job.steady(count)
        except BaseException:
            job.end()
            raise
        return job

    def ours_nodes(self) -> None:
        """Ours: the same, and the coordinator and a silent host."""
        with self._ours() as job:
            job.run(self._scripts["in_place"], "--nodes=2:3")
            job.steady(3)
            event = _kill(*job.wait_for_nodes(3)[2])
            self.result.add("node", ours=job.next_step(event, "node killed"))
            job.steady(3)

            event = _kill(job.wait_for_nodes(3)[2][0], number=signal.SIGTERM)
            self.result.add("node_sigterm", ours=job.next_step(event, "SIGTERM to an agent"))
            job.steady(3)

            job.ask(kind="scale", workers=2)
            job.steady(2)
            job.wait_for_nodes(2)
            event = time.time()
            job.ask(kind="scale", workers=3)
            joined = job.next_step(event, "third node joins", world=3)
            self.result.add("scale_up", ours=joined)
            job.steady(3)
            self._figure("scale_up_pause_s", job.longest_gap(event, event + joined))

            self._coordinator_lost(job)

            event = _kill(*job.wait_for_nodes(3)[0])
            self.result.add("store_host_lost", ours=job.next_step(event, "node of rank 0 killed"))
            job.steady(3)

            self._figure("silent_host_heartbeat_s", job.heartbeat)
            node = job.wait_for_nodes(3)[2]
            event = time.time()
            stop_whole_node(*node)
            self.result.add("silent_host", ours=job.next_step(event, "node stopped"))

    def _coordinator_lost(self, job: Ours) -> None:
        before = job.ask(kind="status")
        begin = time.time()
        job.wait(lambda mark: mark.time > begin + _AROUND, "steps before the kill")
        event = _kill(before["coordinator"]["pid"])
        job.wait(lambda mark: mark.time > event + _AROUND, "steps after the kill")
        self._figure("coordinator_lost_pause_s", job.longest_gap(event, event + _AROUND))
        self._figure("coordinator_usual_pause_s", job.longest_gap(begin, begin + _AROUND))
        after = job.ask(kind="status")
        if after["term"] <= before["term"] or after["round"] != before["round"]:
            raise SystemExit(f"the coordinator's loss changed the job: {before} -> {after}\n{job.tails()}")
        job.wait_for_nodes(3)

    # --- a script with slow imports -------------------------------------------------------------------------------

    def torchrun_slow(self) -> None:
        """Torchrun: memory of four workers, and one of them killed."""
        with self._torchrun() as job:
            job.one_node(self._scripts["plain_slow"], 4)
            job.steady(4)
            pids = job.pids()
            self._figure("memory_spawned_mb", pss_mb(list(pids.values())))
            event = _kill(pids[3])
            names = "full_world_worker", "full_world_unmodified"
            self._rival(
                lambda: job.next_step(event, "worker of four killed", world=4, limit=self._hung), *names
            )

    def ours_slow_unmodified(self) -> None:
        """Ours: the same with the same script."""
        with self._ours() as job:
            job.run(self._scripts["plain_slow"], "--nproc-per-node=4", "--preload=slow_import")
            job.steady(4)
            pids = job.pids()
            workers = set(pids.values())
            self._figure("memory_forked_mb", pss_mb(list(workers)))
            zygote = next(pid for pid in _ancestors(pids[0]) if _is_zygote(pid))
            rest = {zygote, *tree.descendants(zygote)} - workers
            self._figure("memory_zygote_mb", pss_mb(list(rest)))
            event = _kill(pids[3])
            recovered = job.next_step(event, "worker of four killed", world=4)
            self.result.add("full_world_unmodified", ours=recovered)

    def ours_slow_in_place(self) -> None:
        """Ours: a worker, and then a node, come back while the others train."""
        with self._ours() as job:
            job.run(self._scripts["in_place_slow"], "--nodes=3:4", "--preload=slow_import")
            job.steady(4)
            event = _kill(job.pids()[3])
            recovered = job.next_step(event, "worker of four killed", world=4)
            self.result.add("full_world_worker", ours=recovered)
            job.steady(4)
            event = _kill(*job.wait_for_nodes(4)[3])
            recovered = job.next_step(event, "node of four killed", world=4)
            self.result.add("full_world_node", ours=recovered)

    def ours_gibibyte(self) -> None:
        """Ours: a worker with 1 GiB of state joins another."""
        with self._ours() as job:
            job.run(self._scripts["in_place_1g"], "--nodes=1:2")
            job.steady(2)
            event = _kill(job.pids()[1])
            joined = event + job.next_step(event, "worker joins again", world=2)
            alone = [mark.time for mark in job.marks if mark.world == 1 and mark.time < joined]
            self._figure("joiner_1g_dip_s", joined - max(alone))
            job.steady(2)
            joiner = job.pids()[1]
            lines = (job.folder / "syncs").read_text().splitlines()
            syncs = [float(line.split()[2]) for line in lines if int(line.split()[1]) == joiner]
            self._figure("joiner_1g_sync_s", syncs[-1])
            self._figure("joiner_1g_back_s", joined - event)


def _kill(*pids: int, number: signal.Signals = signal.SIGKILL) -> float:
    event = time.time()
    for pid in pids:
        os.kill(pid, number)
    return event


def _lives(job: Torchrun) -> bool:
    """Return whether torchrun without its store host trains on, or still tries to after a minute."""
    event = time.time()
    before = {mark.life for mark in job.look()}
    while time.time() < event + 60:
        if any(mark.life not in before for mark in job.look()):
            return True
        if all(agent.poll() is not None for agent in job.agents):
            return False
        time.sleep(0.05)
    return True


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        found.append(pid)
    return found


def _is_zygote(pid: int) -> bool:
    return pid > 1 and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"elastic-zygote")


def main() -> None:
    """Run both sides in turn and print the ratios."""
    arguments = options(__doc__ or "", repeats=5, quick=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    with tempfile.TemporaryDirectory() as base:
        os.environ["XDG_STATE_HOME"] = str(Path(base, "state"))
        benchmark = Recovery(Path(base), hung=_HUNG if arguments.quick else LIMIT)
        for _ in range(arguments.repeats):
            benchmark.repeat()
        benchmark.finish()
        benchmark.result.show(as_json=arguments.json, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
