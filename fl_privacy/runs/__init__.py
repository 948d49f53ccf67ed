"""A whole experiment: train, intercept, attack, evaluate, report.

``run.run_experiment`` and ``attack.attack_experiment`` take checked settings and leave a run's folder; ``study`` and
``policy_search`` are made of many. Each is made of a ``setup.Setup``, put together of the parts that ``build`` builds.
"""
