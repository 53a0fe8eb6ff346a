"""Cost tables: seconds per expert on each device, from calibrated link models."""
