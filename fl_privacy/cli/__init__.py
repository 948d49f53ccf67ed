"""The command line: Hydra overrides in, a run's folder out."""
