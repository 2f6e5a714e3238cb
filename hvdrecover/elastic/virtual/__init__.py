"""Virtual ranks: shares of a job's work whose result does not depend on who carries them out."""
