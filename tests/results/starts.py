"""What processes do that start the same runs at the same time; imported by each of them, so that it is light."""

from pathlib import Path
from typing import Any

from fl_privacy.errors import UserError
from fl_privacy.runs.folder import RunFolder


def start_all(out: Path, configs: list[dict[str, Any]], together: Any, answers: Any) -> None:
    """Start each of the runs when all processes do; it goes on until all have had their answer."""
    for number, config in enumerate(configs):
        together.wait(60)
        try:
            folder = RunFolder.open_or_create(out, label="a", config=config, config_text="", overwrite=number % 2 == 1)
        except UserError as error:
            answers.put((number, "refused" if "another process" in str(error) else str(error)))
            together.wait(60)
            continue
        answers.put((number, "finished" if folder.finished else "runs"))
        folder.add_attack(round=1, victims=1, seconds=1.0)
        together.wait(60)
        folder.finish()
