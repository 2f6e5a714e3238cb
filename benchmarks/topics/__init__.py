"""The topics: each module has ``measure(setting)``, which gives the rows of the table."""
