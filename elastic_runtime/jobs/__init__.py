"""A job on disk: its folder, events, metrics, record and report."""
