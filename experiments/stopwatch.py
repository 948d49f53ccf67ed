"""Runs ``fl-privacy`` and writes the seconds that each step took, each without the steps within it.

    python experiments/stopwatch.py STEPS.json BEGAN attack model=lenet_dlg attack=idlg

``BEGAN`` is ``time.monotonic()`` of who started this process. It imports nothing that the command does without: what is
timed is the command as a user starts it. Not a command of its own; see ``first_seconds.py``.
"""

import builtins
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = {
    "torch": "importing torch",
    "numpy": "importing numpy and scipy",
    "scipy": "importing numpy and scipy",
    "matplotlib": "importing matplotlib",
    "hydra": "importing Hydra and OmegaConf",
    "omegaconf": "importing Hydra and OmegaConf",
    "fl_privacy": "importing this package and what is small",
}
"""Package -> step that its import belongs to, with all that it imports that is none of these."""

FUNCTIONS = {
    ("fl_privacy.runs.config.compose", "compose_run"): "settings",
    ("fl_privacy.runs.setup", "build_setup"): "data, model and clients",
    ("fl_privacy.runs.setup", "build_untrained"): "data, model and clients",
    ("fl_privacy.runs.setup", "Setup.observe"): "the uploads",
    ("fl_privacy.federation.parallel", "attack_by_all_cores"): "the attack",
    ("fl_privacy.runs.attack_stage", "Judge.scores"): "judging",
    ("fl_privacy.report.charts", "draw_svg"): "charts of the page",
    ("fl_privacy.report.charts", "_svg"): "charts of the page",
    ("fl_privacy.report.gallery", "grid_picture"): "the picture of all images",
    ("fl_privacy.report.write", "write_report"): "the rest of the page",
}
"""Function -> step that it belongs to."""

START, REST = "Python itself", "training, recording and the rest"


class Stopwatch:
    """Adds up seconds by the clock and of CPU; a step within another one stops that."""

    def __init__(self, began: float) -> None:
        self.steps: dict[str, list[float]] = {START: [time.monotonic() - began, time.process_time()]}
        self._open = [REST]
        self._since = time.monotonic(), time.process_time()

    def turn(self) -> None:
        """Add what has passed to the step that is open."""
        now = time.monotonic(), time.process_time()
        passed = self.steps.setdefault(self._open[-1], [0.0, 0.0])
        for place in (0, 1):
            passed[place] += now[place] - self._since[place]
        self._since = now

    @contextmanager
    def within(self, step: str) -> Iterator[None]:
        self.turn()
        self._open.append(step)
        try:
            yield
        finally:
            self.turn()
            self._open.pop()

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            with self.within(step):
                return function(*values, **named)

        return call


def watch_imports(watch: Stopwatch) -> None:
    """Time imports, and the functions of ``FUNCTIONS`` as soon as their modules are there."""
    plain, left = builtins.__import__, dict(FUNCTIONS)

    def watched(name: str, *rest: Any, **named: Any) -> Any:
        step = PACKAGES.get(name.partition(".")[0])
        if step is None or name in sys.modules:
            found = plain(name, *rest, **named)
        else:
            with watch.within(step):
                found = plain(name, *rest, **named)
        for (module, path), of in list(left.items()):
            owner: Any = sys.modules.get(module)
            first, _, last = path.rpartition(".")
            owner = getattr(owner, first, None) if first else owner
            if hasattr(owner, last):
                del left[module, path]
                setattr(owner, last, watch.timed(of, getattr(owner, last)))
        return found

    builtins.__import__ = watched


def main() -> None:
    kept, began, *words = sys.argv[1:]
    watch = Stopwatch(float(began))
    watch_imports(watch)
    sys.path[0] = sys.path[1]  # the package's folder, which PYTHONPATH names, in place of this script's
    from fl_privacy.cli.main import run_command_line  # noqa: PLC0415

    status = run_command_line(words)
    watch.turn()
    Path(kept).write_text(json.dumps(watch.steps), encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
