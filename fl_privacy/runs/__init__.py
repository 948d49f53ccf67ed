"""Run whole experiments: train, intercept, attack, evaluate, report.

``run.run_experiment`` and ``attack.attack_experiment`` build a ``setup.Setup`` from settings and fill a run's folder.
"""
