"""Run whole experiments: train, intercept, attack, evaluate, report."""
