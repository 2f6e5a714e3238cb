"""Virtual ranks: parts of a job's work whose results do not depend on which process carries them out."""
