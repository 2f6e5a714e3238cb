"""A host that comes back while Horovod's driver waits for it: its slots are started again.

Horovod 0.28.1 takes all slots of its last assignment for running ones. Where too few are left for the job,
there is no other assignment until a lost host is back, so nobody is started on it, and all wait for ever.
"""

from __future__ import annotations

import threading
from typing import Any


def start_anew(driver: Any) -> None:
    """Have a driver's class forget the slots of hosts that it has given up since it started them.

    Args:
        driver: Horovod's class, which is changed.
    """
    start, assign = driver._start_worker_process, driver._update_host_assignments

    def started(self: Any, slot: Any) -> None:
        given_up: threading.Event = self._host_manager.get_host_event(slot.hostname)
        vars(self).setdefault("_given_up", {})[slot.hostname, slot.local_rank] = given_up
        start(self, slot)

    def assigned(self: Any, hosts: Any) -> Any:
        given_up = vars(self).get("_given_up", {})
        lost = {place for place, event in given_up.items() if event.is_set()}
        kept = {
            host: [slot for slot in slots if (host, slot.local_rank) not in lost]
            for host, slots in self._host_assignments.items()
        }
        self._host_assignments = {host: slots for host, slots in kept.items() if slots}
        return assign(self, hosts)

    driver._start_worker_process, driver._update_host_assignments = started, assigned
