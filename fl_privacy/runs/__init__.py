"""Run whole experiments: train, intercept, attack, evaluate, report.

``run.run_experiment`` and ``attack.attack_experiment`` turn checked settings into a run's folder by a ``setup.Setup``.
"""
