"""The rules that a run has to keep, and what to do about each that is broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One rule: its name, and what helps if it is broken."""

    name: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A rule that a run has broken, and what was seen of it."""

    rule: Rule
    message: str


STEP_FIRST = Rule(
    "steps come before their commit",
    "In the training loop call optimizer.step() first, then record_batch, and state.commit() last.",
)
NOT_OVERWRITTEN = Rule(
    "nothing recovered is overwritten",
    "Make models and optimizers before the function that recover.run decorates, and set nothing of them "
    "anew in there: it is called again after each fault, with the state as it was committed.",
)
COUNTERS = Rule(
    "counters continue",
    "Set a counter once, when the state is made, and count on from what the state says.",
)
DATA = Rule(
    "data continue where they were",
    "Let an ElasticSampler (TensorFlow: elastic_dataset) that the state tracks decide on the order, with a "
    "constant seed, of a data set that is the same in every process; call record_batch after each batch "
    "and set_epoch with the state's epoch; and let augmentation draw from the framework's global "
    "generators only, which commits seed.",
)
SAMPLES = Rule(
    "each sample exactly once",
    "Call record_batch right after the optimizer's step and before the commit, with the size of the batch, "
    "and set_epoch with the state's epoch.",
)
WEIGHTS = Rule(
    "weights are those of an undisturbed run",
    "Whatever the next step depends on (models, optimizers, schedulers, scalers, counters) must be an "
    "attribute of the state, and nothing of it may be set anew in the function that recover.run decorates.",
)
LOSS = Rule(
    "the loss is no worse than undisturbed",
    "What depends on the number of ranks, such as a learning rate, must be derived from hvd.size() anew "
    "whenever the function that recover.run decorates is called.",
)
REPRODUCIBLE = Rule(
    "the script is reproducible",
    "No fault had struck by then, so a recovery can't be told from chance: use deterministic algorithms, a "
    "fixed number of threads, and only the framework's global generators.",
)
STEPS_AGAIN = Rule("every rank steps again", "`hvdrecover report` of the run's events tells what happened.")
NO_PROCESSES = Rule(
    "no process is left",
    "Have whatever starts processes end them, or make them die with their parent (PR_SET_PDEATHSIG).",
)
NO_SHARED_MEMORY = Rule(
    "no shared memory is left",
    "A process that is killed can't remove names from shared memory: use memory without a name (memfd), or "
    "remove the name as soon as all have opened it.",
)
NO_TEMPORARY_FILES = Rule(
    "no temporary file is left",
    "Make temporary files and folders by `with tempfile.TemporaryDirectory()` or `NamedTemporaryFile()`, or "
    "remove them at the end of what needs them, also when that ends by an exception: a recovery is one.",
)
NO_GROWTH = Rule("nothing grows", "Close what is opened anew in each recovery, and let go what it replaces.")
EXIT_CODES = Rule("exit codes tell the truth", "The end of the run's log tells why it ended.")
ROOT = Rule("the checkpoint root is whole", "`hvdrecover verify` of the run's checkpoint root tells more.")

RANK_LOCAL = Rule(
    "rank-local state is each rank's own again",
    "If no step depends on it, as with batch norm in training mode, nothing has to be done. Else have it the "
    "same on all ranks: synchronize batch norm, and average sums and statistics over the ranks before each "
    "commit. What is only shown, such as a list of this rank's losses, may also stay out of the state.",
)

ALL = (
    STEPS_AGAIN,
    WEIGHTS,
    LOSS,
    SAMPLES,
    DATA,
    NOT_OVERWRITTEN,
    COUNTERS,
    STEP_FIRST,
    REPRODUCIBLE,
    ROOT,
    EXIT_CODES,
    NO_PROCESSES,
    NO_SHARED_MEMORY,
    NO_TEMPORARY_FILES,
    NO_GROWTH,
)
