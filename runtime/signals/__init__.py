"""What a live run tells while it runs, step by step: JSON lines, and the running sums that tables and metrics show."""
