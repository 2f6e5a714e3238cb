"""Virtual ranks: fixed shares of the work. The result does not depend on which process does which share."""
