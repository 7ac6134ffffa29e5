"""Process trees of one machine: killing all of one, dying with a parent, and the guard that leaves no orphan."""
