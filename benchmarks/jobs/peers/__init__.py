"""The same small job under each peer, and the launchers that peers need of their own."""
