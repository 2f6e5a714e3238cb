"""The deadline of each wait of supervisors, guardians and standbys, in seconds.

`hangs` has the deadlines of training processes.
"""

# Guardian
LOOK = 0.2  # between looks at the page of the training process
DISMISSAL = 45.0  # for the supervisor to end the job, when an error of the script is to end it
STACKS = 1.0  # for a training process to write down its stacks
OUTPUT = 2.0  # for a slow reader of output to make room; less than any hang timeout
LAST_OUTPUT = 20.0  # for a slow reader of output to take anything when the process ends

# Supervisor
SUPERVISION = 0.5  # between looks at horovodrun
LAST_WORDS = 1.0  # for guardians to obey before all is killed
LINGERING = 60.0  # for horovodrun to end when the training is finished and all guardians have gone
SPARE = 10.0  # for a guardian of a spare host, or of a host that returns at once, to replace a lost one
CULPRIT = 2.0  # for the process whose loss failed the others to be reported
HEARSAY = 10.0  # for the rank that had an error to report it, when others have
CONTROLLER = 30.0  # for Slurm's controller, which may be busy
BETWEEN_QUESTIONS = 10.0  # between questions to Slurm's controller

# Both
MESSAGE = 5.0  # for the other side to take a message, or to say who it is; and for a connection, with its DNS
DISK = 5.0  # for a disk to take a line, such as an event
KILLED = 5.0  # for a killed process to end; one that waits for a disk may never do so
ALL_KILLED = 30.0  # for all processes of a job to end that were killed
DISCOVERY = 60.0  # for a discovery script, while Horovod's driver can do nothing about hosts
