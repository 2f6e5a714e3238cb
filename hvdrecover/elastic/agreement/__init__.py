"""Agreement of the ranks on one commit after a rendezvous."""
