"""Host discovery: a host source is asked, its answer checked, and given in time whatever happens."""
