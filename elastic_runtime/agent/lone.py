"""An agent that no supervisor watches: it has a zygote of its own, and says itself what a supervisor would."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elastic_runtime.agent.config import AgentConfig
from elastic_runtime.agent.environment import DEFAULTS
from elastic_runtime.agent.last_words import last_report
from elastic_runtime.agent.main_program import path_entry
from elastic_runtime.agent.node import NodeAgent
from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.zygote_handle import ZygoteHandle

__all__ = ["LoneAgent"]


class LoneAgent(NodeAgent):
    """The agent of a host. What concerns nobody but this host goes to its standard error."""

    def __init__(self, config: AgentConfig, node: str) -> None:
        """Serve the coordinator that `config` names, as the node of this name."""
        program = Program(
            script=config.program.script,
            module=config.program.module,
            environment={**DEFAULTS, **os.environ, **config.environment},
            cwd=os.getcwd(),  # noqa: PTH109 - as the environment has it
        )
        logs = Path(config.job_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._zygote = ZygoteHandle(
            logs / f"zygote-{node}.log",
            preload=config.preload,
            entry=path_entry(program),
            environment=program.environment,
        )
        self._told = ""
        self._reported = (0, -1)
        self._alone_since: float | None = time.monotonic()
        super().__init__(config, node, supervisor=None, requests=self._zygote.requests)

    def run(self) -> int:
        """Work until told to leave; return the exit code: 1 if this node was refused, or found no coordinator."""
        self._zygote.start()
        try:
            super().run()
        finally:
            self._zygote.close()
        if self._leaving:
            self._say(f"node {self._node} ends: {self._leaving}")
        over = ("job ", "the job ", *(sent.name for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
        return 0 if self._leaving.startswith(over) else 1

    def _helpers(self) -> set[int]:
        zygote = self._zygote.pid
        return super()._helpers() | (set() if zygote is None else {zygote})

    def _look_around(self, seconds: float) -> None:
        for said in self._zygote.watch(seconds):
            self._say(said)
        self._look_for_coordinator()
        if any(slot.known.rank == 0 for slot in self._slots.values()):
            report = last_report(Path(self._config.job_dir) / "metrics.jsonl")
            if report != self._reported:
                self._reported = report
                self._uplink.send("progress", step=report[0], round=report[1])

    def _look_for_coordinator(self) -> None:
        now, trouble = time.monotonic(), self._uplink.trouble
        if trouble and trouble != self._told:
            self._say(trouble)
        self._told = trouble
        if self._uplink.is_open:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self._config.patience and not self._leaving:
            self._leave(f"no coordinator for {self._config.patience:.0f} s: {trouble}", self._config.grace)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"[elastic] {text}\n")
        sys.stderr.flush()
