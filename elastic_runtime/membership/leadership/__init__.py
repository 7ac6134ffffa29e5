"""Who may decide: back ends that give a lease with a term, of which every later one is larger.

`lease` says what they have in common; `machine_lock`, `candidates` (with the pure `election`), `etcd` and
`kubernetes` are the back ends. A paused leader cannot know that it was replaced, so no back end promises that there
is only one; what it promises is that two never have the same term. Decisions carry it, and old ones are refused.
"""

from elastic_runtime.membership.leadership.lease import Keeper, Leadership, Lease
from elastic_runtime.membership.leadership.machine_lock import MachineLock

__all__ = ["Keeper", "Leadership", "Lease", "MachineLock"]
