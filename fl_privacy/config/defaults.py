"""What a section leaves out has the value that what it builds gives it, so that files hold only what differs."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fl_privacy.config.signatures import Signature, signature_of

COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "attack": {"shards": 1},
    "defense": {},
    "data": {},
    "partition": {},
    "server": {},
    "guard": {},
}
"""Section -> settings of it that its ``_target_`` does not take."""

NESTED = ("inference",)
"""Sections that hold sections like those, as several of their options can be chosen at once."""

_ANY_MODEL = {"init": None, "lora_rank": None, "lora_alpha": None}

_CHECKED: Mapping[str, Mapping[str, Any]] = {"data": {}, "partition": {}, "model": _ANY_MODEL, **COMPLETED}
"""Likewise, of all sections that are checked before anything is built."""


def complete(config: DictConfig) -> None:
    """Add to the sections of ``COMPLETED`` what they leave out.

    Raises:
        UserError: what a section builds can't be imported.
    """
    for name, section, own in completed_sections(config):
        if (signature := _signature(section, name)) is None:
            continue
        with open_dict(section):
            for key, value in {**signature.defaults, **own}.items():
                if key not in section:
                    section[key] = value


def completed_sections(config: DictConfig) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Dotted name and content of each section that ``complete`` adds to, and what its ``_target_`` does not take."""
    yield from ((name, config.get(name), own) for name, own in COMPLETED.items())
    yield from _nested(config)


def check_types(config: DictConfig) -> None:
    """Refuse settings of a wrong type before anything is built from them.

    Raises:
        UserError: there is a setting of a wrong type.
    """
    plain = [(name, config.get(name), others) for name, others in _CHECKED.items()]
    for name, section, others in [*plain, *_nested(config)]:
        if (signature := _signature(section, name)) is None:
            continue
        settings = OmegaConf.to_container(section, resolve=True)
        assert isinstance(settings, dict)
        signature.check({str(key): value for key, value in settings.items() if key not in others}, name)


def _nested(config: DictConfig) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for name in NESTED:
        section = config.get(name)
        for key, below in section.items() if isinstance(section, DictConfig) else ():
            if isinstance(below, DictConfig):
                yield f"{name}.{key!s}", below, {}


def _signature(section: object, name: str) -> Signature | None:
    target = section.get("_target_") if isinstance(section, DictConfig) else None
    return None if target is None else signature_of(str(target), name)
