"""A whole experiment: train, intercept, attack, evaluate, report."""
