"""All that leans on Flower's inside, which any version may change; ``tests/flower/test_inside.py`` says what broke.

``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp`` are Flower's public face and are used elsewhere as well;
anything else of Flower is imported in this folder alone.
"""
