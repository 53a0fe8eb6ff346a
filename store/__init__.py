"""What is kept: probes, calibrations, runs, simulations, in SQLite through SQLAlchemy. The second floor."""
