"""Which processes on this host are proven dead, for recovery to act on."""

from __future__ import annotations

from dataclasses import replace

from ..ledger import Death, Identity, Ledger, hosts, reads
from .liveness import Life, check


def deaths_on_this_host(ledger: Ledger, here: Identity) -> list[Death]:
    """Return the writable executions of this host whose process is proven gone.

    Raises:
        Unavailable: the database cannot serve this now.
    """
    with ledger.read() as connection:
        held = reads.held_on(connection, here.host)
    verdicts = {identity: check(identity, here) for identity in {death.identity for death in held}}
    return [
        replace(death, evidence=verdicts[death.identity].reason)
        for death in held
        if verdicts[death.identity].life is Life.DEAD
    ]


def silent_hosts(ledger: Ledger, *, lease_seconds: float) -> list[Identity]:
    """Return the processes held on hosts whose probe let its lease run out, and has been silent for another one.

    A host that never had a probe is not judged.

    Raises:
        Unavailable: the database cannot serve this now.
    """
    with ledger.read() as connection:
        silent = [host.host for host in hosts.known(connection) if host.silent > lease_seconds]
        return list({death.identity for host in silent for death in reads.held_on(connection, host)})
