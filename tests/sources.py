"""Sources under test, parsed once in a process; files that import this run one after the other in the same one."""

import ast
import gc
from functools import cache


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return the module that ``source`` is and all nodes below it; they are shared: change none."""
    found = tuple(ast.walk(ast.parse(source)))
    gc.freeze()  # they are no garbage, and a million
    return found
