"""The same network, forward only."""
