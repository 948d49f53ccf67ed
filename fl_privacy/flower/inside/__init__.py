"""All uses of Flower's internals, which any version may change; ``tests/flower/test_inside.py`` reports what broke."""
