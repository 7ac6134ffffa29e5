"""Processes of one machine: the guard that leaves no orphan, and the supervisor of the local nodes."""
