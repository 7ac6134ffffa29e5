"""Who is in the job: rounds, ranks, restart budget, and who may decide about them.

The rules are in `machine`, a state machine without I/O; `failures` says what counts and what is the user's own bug.
"""
