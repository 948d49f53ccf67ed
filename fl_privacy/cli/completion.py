"""Shell completion of overrides: keys, and the options of a group after ``=``."""

import os


def completes() -> bool:
    """Return ``True`` if a shell asks for completions."""
    return "_FL_PRIVACY_COMPLETE" in os.environ


def complete_override(incomplete: str) -> list[str]:
    """List all completions of ``incomplete`` (``def``, ``defense=pr``), also after commas."""
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
