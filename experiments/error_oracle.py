"""What a server hears of a bit of an example, from defended clients of every kind, beside values with noise.

    python experiments/error_oracle.py --questions 400

Each kind of client is asked the same generated questions in two worlds that differ in one pixel, and each question once
more, then another one of the same round. A reply tells the bit where anything but noised values differs: an error, its
text, names, sizes, kinds of numbers, values that are not finite, figures, counts. Of clients that promise no
differential privacy what differs is listed, and must be replies and the one line of an error. Times are medians of
differences over the questions that reach the training, asked in turn; a bit is heard in them from 5 ms on.
"""

import argparse
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from fl_privacy.federation.replies import WITHHELD
from tests.flower.oracles import OTHERS, PRIVATE, Asked, Make, Question, ordinary, questions, seen, worlds

HEARD = 0.005
"""Seconds between the worlds from which on a server hears a bit."""


@dataclass
class Heard:
    """Of one kind of client: replies that differ between the worlds, and seconds of each reply in both."""

    differ: int = 0
    errors: int = 0
    badly: int = 0
    asked: int = 0
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def between(self) -> float:
        """Return the median of the seconds between the worlds, of the same question at the same time."""
        pairs = [dark - bright for dark, bright in zip(*self.seconds, strict=True)]
        return abs(statistics.median(pairs)) if pairs else 0.0


def ask_both(
    both: tuple[Asked, Asked], question: Question, *, again: bool, turn: int
) -> tuple[list[dict[str, object]], list[float]]:
    """Ask in both worlds, every other time in the dark one first."""
    said: dict[int, tuple[dict[str, object], float]] = {}
    for place in (0, 1) if turn % 2 else (1, 0):
        started = time.perf_counter()
        reply = both[place].ask(question, again=again)
        said[place] = seen(reply), time.perf_counter() - started
    return [said[0][0], said[1][0]], [said[0][1], said[1][1]]


def listen(name: str, make: Make, number: int, folder: Path, kinds: tuple[str, ...]) -> Heard:
    """Ask one kind of client."""
    both, heard = worlds(make, name, folder), Heard()
    for world in both:
        world.ask(ordinary())
    for turn, question in enumerate(questions(number, kinds)):
        for again, asked in ((False, question), (True, question), (True, ordinary(question.kind))):
            said, seconds = ask_both(both, asked, again=again, turn=turn)
            heard.asked += 1
            heard.differ += said[0] != said[1]
            errors = [str(told["error"]) for told in said if "error" in told]
            heard.errors += len(errors) == 2
            heard.badly += said[0] != said[1] and any(WITHHELD not in error for error in errors)
            if not again and len(errors) < 2:
                for times, took in zip(heard.seconds, seconds, strict=True):
                    times.append(took)
    return heard


def main() -> int:
    """Print a row for each kind of client; 1 where a server hears what it must not."""
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--only", default="", help="clients whose name has this in it")
    parser.add_argument("--promise", choices=("yes", "no"), help="of differential privacy, or clients without it")
    options, failed = parser.parse_args(), 0
    print("| client | promises | asked | differ | errors in both | ms between the worlds | of |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for promise, clients in (("yes", PRIVATE), ("no", OTHERS)):
        for name, make in clients.items():
            if options.only not in name or options.promise not in (None, promise):
                continue
            with tempfile.TemporaryDirectory() as folder:
                heard = listen(name, make, options.questions, Path(folder), ("train",))
            wrong = heard.differ if promise == "yes" else heard.badly
            failed += bool(wrong) or (promise == "yes" and heard.between > HEARD)
            took = statistics.median(heard.seconds[0] or [0])
            times = f"{1000 * heard.between:.2f} | {1000 * took:.1f}"
            print(f"| {name} | {promise} | {heard.asked} | {heard.differ} | {heard.errors} | {times} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
