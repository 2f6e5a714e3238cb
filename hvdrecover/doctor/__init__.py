"""Checks of a job's hosts, network, Horovod and checkpoint root before the job is started."""
