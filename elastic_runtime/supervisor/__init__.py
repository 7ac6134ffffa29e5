"""Runs one job on this machine: rounds, nodes, store, logs and progress."""
