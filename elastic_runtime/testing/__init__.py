"""Help for tests of elastic training, also for users': deterministic faults."""
