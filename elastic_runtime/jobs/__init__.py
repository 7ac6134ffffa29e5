"""What a job is and what is left of it: specification, folder, events, record and report."""
