"""Which hosts a job may use: asked of a host source, checked, and answered in time whatever happens."""
