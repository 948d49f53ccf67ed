"""What a shell offers where an override is typed: keys, and behind ``=`` the options of a group."""

import os


def completes() -> bool:
    """Say whether a shell asks what could stand next, instead of running a command."""
    return "_FL_PRIVACY_COMPLETE" in os.environ


def complete_override(incomplete: str) -> list[str]:
    """List all ways to go on from ``incomplete`` (``def``, ``defense=pr``); several options stand behind commas."""
    from fl_privacy.runs.config import options  # noqa: PLC0415  (help goes without)
    from fl_privacy.runs.config.keys import declared_settings, groups  # noqa: PLC0415

    named = (*groups(), "experiment")
    key, equals, value = incomplete.partition("=")
    if not equals:
        keys = dict.fromkeys([*named, *(name for name, _ in declared_settings())])
        return [f"{name}=" for name in keys if name.startswith(key)]
    if key not in named:
        return []
    chosen, comma, last = value.rpartition(",")
    return [f"{key}={chosen}{comma}{name}" for name in options(key) if name.startswith(last)]
