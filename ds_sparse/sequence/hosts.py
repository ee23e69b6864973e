"""The group over which the hosts of ranks tell each other what they know without their devices."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import distributed
from torch.distributed.distributed_c10d import get_backend_config

from ..ranks import let_gloo_finish_at_exit

_MADE: WeakKeyDictionary[distributed.ProcessGroup, distributed.ProcessGroup] = WeakKeyDictionary()


def over_hosts(group: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """The same ranks with a backend for the CPU: the group itself where it has one, as gloo's, else a group of gloo
    beside it, which all ranks make when they first ask for it. What goes over NCCL waits for all that the GPU has still
    to do; what goes over this does not."""
    if "cpu:" in get_backend_config(group):
        return group
    if group not in _MADE:
        let_gloo_finish_at_exit()
        ranks = distributed.get_process_group_ranks(group)
        _MADE[group] = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _MADE[group]
