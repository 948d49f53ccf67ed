"""Random generators that a data set, or a transform within it, has of its own."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

MOST_LOOKED_AT = 1000
"""Objects within a data set that are searched for generators."""

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@contextmanager
def own_streams_put_back(data: object) -> Iterator[None]:
    """Put the generators within ``data`` back to where they were before the context.

    Those that its attributes, and theirs, hold are found, also in lists and mappings; one in a closure is not.
    """
    held = [(generator, _state(generator)) for generator in _generators(data)]
    try:
        yield
    finally:
        for generator, state in held:
            _put_back(generator, state)


def _generators(data: object) -> list[Generator]:
    found: list[Generator] = []
    seen, waiting = set[int](), [data]
    while waiting and len(seen) < MOST_LOOKED_AT:
        each = waiting.pop(0)
        if id(each) in seen or isinstance(each, torch.Tensor | np.ndarray | str | bytes | int | float | type):
            continue
        seen.add(id(each))
        if isinstance(each, Generator):
            found.append(each)
        elif isinstance(each, list | tuple):
            waiting += each[:MOST_LOOKED_AT]
        elif isinstance(each, Mapping):
            waiting += list(each.values())[:MOST_LOOKED_AT]
        else:
            waiting += list(getattr(each, "__dict__", {}).values())
    return found


def _state(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def _put_back(generator: Generator, state: object) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)  # type: ignore[arg-type]
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state  # type: ignore[assignment]
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)  # type: ignore[arg-type]
    else:
        generator.setstate(state)  # type: ignore[arg-type]
