"""torch's side of the rendezvous backend `elastic`: the handler that a torchrun agent holds."""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported, but not declared
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_runtime.membership.rendezvous import RendezvousConfig
from elastic_runtime.membership.rendezvous_client import RendezvousClient
from elastic_runtime.membership.rendezvous_host import is_loopback
from elastic_runtime.membership.rendezvous_rounds import Begin, Proceed
from elastic_runtime.membership.sockets import listen

__all__ = ["ElasticRendezvousHandler"]

log = logging.getLogger(__name__)

_CONNECT = 5.0
"""Seconds in which the store of a round must answer: its holder has the socket before the round is formed."""
_RETRY = 1.0
_MEET = 40.0
"""Seconds in which the coordinator says what becomes of a round; its own limit is below."""


class ElasticRendezvousHandler(RendezvousHandler):
    """A node's place in the rounds of its job. See the base class for who calls what."""

    def __init__(self, config: RendezvousConfig) -> None:
        """Begin to connect; on the coordinator's machine, start it. Raises what `read_secret` raises."""
        self._config = config
        self._client = RendezvousClient(config)
        self._server: TCPStore | None = None
        self._problem = ""

    def get_backend(self) -> str:
        """Return `elastic`."""
        return "elastic"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the round's store, which is new in every round, as their own."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._config.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's place in the next round, once all of its nodes have reached the round's store.

        Raises `RendezvousClosedError` if the job is over (`RendezvousGracefulExitError` if this node had no place in
        it and waited as a spare), `RendezvousTimeoutError` if no round came about in
        `join_timeout` seconds, `WrongSecretError` and `InputError` if the coordinator does not take this node.
        """
        deadline = time.monotonic() + self._config.join_timeout
        while True:
            listener = listen(self._bind_to())
            try:
                place = self._place(listener, deadline)
                store = self._store(place, listener)
            finally:
                listener.close()
            if store is None:
                self._client.reply(_RETRY)  # The coordinator sees the loss of a holder at once, and says so.
                continue
            self._client.met(place.round)
            answer = self._client.reply(min(_MEET, max(0.0, deadline - time.monotonic())))
            if isinstance(answer, Begin):
                log.info("round %d: rank %d of %d nodes", place.round, place.rank, place.world)
                return self._info(place, store)
            self._raise_if_over()
            log.info("round %d did not come about: joining again", place.round)

    def _bind_to(self) -> str:
        """Return where a store of this node listens: where other nodes can reach it, and no further."""
        reached_by = self._config.local_addr or self._config.host
        if is_loopback(reached_by):
            return "127.0.0.1" if reached_by == "localhost" else reached_by
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"

    def _place(self, listener: socket.socket, deadline: float) -> Proceed:
        """Wait for a place in the next round."""
        config, client = self._config, self._client
        local = client.local_host(deadline - time.monotonic())
        if config.local_addr:
            local = config.local_addr
        elif is_loopback(local) and not is_loopback(config.host):
            local = socket.getfqdn()  # The coordinator is here; other nodes need a name of this machine.
        while local:
            client.join((local, listener.getsockname()[1]))
            answer = client.reply(max(0.0, deadline - time.monotonic()))
            if isinstance(answer, Proceed):
                return answer
            if answer is None:
                break
        self._raise_if_over()
        why = client.problem or self._problem or f"fewer than {config.minimum} nodes came"
        raise RendezvousTimeoutError(f"no round in {config.join_timeout:g} s: {why}")

    def _raise_if_over(self) -> None:
        if self._client.closed:
            over = f"the job {self._config.run_id!r} is over"
            # torchrun ends with success on the first: a node that was never needed has not failed.
            raise RendezvousGracefulExitError(over) if self._client.spare else RendezvousClosedError(over)

    def _store(self, place: Proceed, listener: socket.socket) -> TCPStore | None:
        """Return the store of the round: made here by rank 0, else reached. None if its holder is gone."""
        host, port = place.store
        try:
            if place.rank == 0:
                # The port was known before the round was formed, and nobody else can have taken it.
                store = TCPStore(
                    host, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False,
                    timeout=timedelta(seconds=_CONNECT),
                )  # fmt: skip
                self._server = store
            else:
                socket.create_connection(
                    (host, port), _CONNECT
                ).close()  # Refused at once; TCPStore would try on.
                store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT))
                self._server = None
        except (OSError, RuntimeError, ValueError) as error:
            self._problem = f"the store of round {place.round} at {host}:{port} cannot be reached: {error}"
            log.warning("%s", self._problem)
            return None
        store.set_timeout(timedelta(seconds=self._config.read_timeout))
        return store

    def _info(self, place: Proceed, store: Store) -> RendezvousInfo:
        host, port = place.store
        if self.use_agent_store:
            bootstrap = RendezvousStoreInfo(host, port)
        else:
            bootstrap = RendezvousStoreInfo.build(
                place.rank, store, local_addr=self._config.local_addr or host
            )
        return RendezvousInfo(store, place.rank, place.world, bootstrap)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for a round with this one; above 0 also when a node of its round is lost."""
        return self._client.waiting

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._client.closed

    def set_closed(self) -> None:
        """Say that the job is over: no node gets a place any more, and the loss of one stops nobody."""
        self._client.close_job()

    def shutdown(self) -> bool:
        """Close the job and hang up; return whether the coordinator was told."""
        self._client.close_job()
        return self._client.stop()
