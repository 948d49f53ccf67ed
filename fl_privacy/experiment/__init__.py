"""A whole experiment: train, intercept, attack, evaluate, report.

``run.run_experiment`` and ``attack.attack_experiment`` take checked settings and leave a run's folder; ``trade_off``
and ``policy_search`` are made of many. All of them are made of a ``setup.Setup``, which ``setup`` builds of what ``build`` makes.
"""
