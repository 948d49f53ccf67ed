"""All uses of Flower's internals, which any version may change; ``tests/flower/test_inside.py`` reports what broke.

Only this folder imports more of Flower than the public ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``.
"""
