"""Virtual ranks: shares of the work of a job whose results do not depend on which process carries them out."""
