"""``faulty_digits.py`` with more places for faults: the stages of a recovery, which are private functions."""

import functools

import faulty_digits

from hvdrecover import heartbeat
from hvdrecover.state import durable, horovod, rendezvous


def before(target, name, place):
    """Let faults strike whenever a function is about to be called."""
    original = getattr(target, name)

    @functools.wraps(original)
    def faulty(*arguments, **keywords):
        counts = heartbeat.page.read()
        faulty_digits.strike(place, counts.rank, counts.commit)
        return original(*arguments, **keywords)

    setattr(target, name, faulty)


before(horovod.HorovodWorld, "shutdown", "reset")
before(horovod.HorovodWorld, "init", "rendezvous")
before(durable, "load_newest", "load")
before(rendezvous, "send", "sync")
before(rendezvous, "_broadcast_files", "agree")
faulty_digits.main()
