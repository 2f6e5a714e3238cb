"""The deadline of each wait of supervisors, guardians and standbys, in seconds.

`hangs.DEADLINES` has the deadlines of training processes. `UNBOUNDED` lists each call that may block without
a timeout of its own, with the reason. A test compares this file with the calls in the code.
"""

from __future__ import annotations

from collections.abc import Mapping

# Guardian
LOOK = 0.2  # between looks at the page of the training process
DISMISSAL = 45.0  # for the supervisor to end the job, when an error of the script is to end it
STACKS = 1.0  # for a training process to write down its stacks
DRIVER = 0.5  # for Horovod's driver to take a connection
OUTPUT = 2.0  # for a slow reader of output to make room; less than any hang timeout
LAST_OUTPUT = 20.0  # for a slow reader of output to take anything when the process ends

# Supervisor
SUPERVISION = 0.5  # between looks at horovodrun
LAST_WORDS = 1.0  # for guardians to obey before all is killed
LINGERING = 60.0  # for horovodrun to end when the training is finished and all guardians have gone
PLACES = 3.0  # for guardians to say where ranks are
OTHER_ERRORS = 2.0  # for other ranks to fail as one has at the start, so that they are counted,
IMPORTS = 30.0  # once all have imported an adapter; so many at most for that
CULPRIT = 2.0  # for the process whose loss failed the others to be reported
HEARSAY = 10.0  # for the rank that had an error to report it, when others have
CONTROLLER = 30.0  # for Slurm's controller, which may be busy
BETWEEN_QUESTIONS = 10.0  # between questions to Slurm's controller
SSH = 15.0  # for ssh to reach a host, the resolution of the name included

# Both
MESSAGE = 5.0  # for the other side to take a message, or to say who it is; and for a connection, with its DNS
DISK = 5.0  # for a disk to take a line, such as an event
KILLED = 5.0  # for a killed process to end; one that waits for a disk may never do so
ALL_KILLED = 30.0  # for all processes of a job to end that were killed
DISCOVERY = 60.0  # for a discovery script, while Horovod's driver can do nothing about hosts

_START = "at the start of the job: nothing runs yet that could be lost, and a person or scheduler waits"
_BOUNDED = "callers bound it by waits.DISK"
_RECORD = "the record bounds it by waits.DISK"
_OWN_THREAD = "in a daemon thread of its own, for which nothing waits"
_PIPE_HAS_ROOM = "a pipe takes 64 KiB without a reader, and these bytes are all that ever comes"
_SOCKET = "the socket has a timeout of waits.MESSAGE, or 0 at the supervisor"

UNBOUNDED: Mapping[str, str] = {
    "signals.run_below: wait": "the first process of a container lasts as long as the job below "
    "it, whose processes have deadlines",
    "standby.main: readline": "a standby waits for as long as nothing is lost; it dies with its guardian",
    "standby.start: open": "a file in memory",
    "standby.wake: write": _PIPE_HAS_ROOM,
    "standby.wake: flush": _PIPE_HAS_ROOM,
    "standby._silence: open": "/dev/null",
    "standby._forget_input: open": "/dev/null",
    "link.Link.send_line: sendall": _SOCKET,
    "link.Link.arriving: recv": _SOCKET,
    "guardians.Guardians._accept: accept": "the listener does not block",
    "output.Outlet._pump: wait_for": _OWN_THREAD,
    "output.Outlet._pump: write": _OWN_THREAD,
    "output.append: open": "in horovodrun as it starts workers; a person sees that none comes",
    "output.unblocked: flush": _START,
    "presence.Announcement.__init__: mkdir": _START,
    "presence.Announcement._write: write_text": _BOUNDED + "; the first: " + _START,
    "presence.Announcement._write: replace": "as the write before it",
    "ssh.kept_alive: mkdir": _START,
    "ssh.kept_alive: write_text": _START,
    "ssh.kept_alive: replace": _START,
    "ssh.main: write": "a file in memory",
    "processes.start: Child": "waits until the program runs: on a disk that hangs, there is nothing to train "
    "with. The supervisor's SIGKILL ends a guardian that waits here",
    "slurm.leave_heir: Popen": "the last act of a guardian",
    "job.Job.__init__: Popen": _START,
    "job.Job.__init__: open": "the log of a drill's job; " + _START,
    "reports.Reports._send_events: flush": _RECORD,
    "supervisor.Supervisor._serve: flush": _RECORD,
    "stacks._append: mkdir": _BOUNDED,
    "stacks._append: open": _BOUNDED,
    "stacks._append: write": _BOUNDED,
}
"""The calls that may block without a timeout, as ``module.function: name``, each with its reason."""
