"""One ``flwr run`` of this repository's app in Flower's simulation; the SuperLink that it takes is ended with it."""

import sys
import tempfile
from pathlib import Path

from fl_privacy.site.deploy.loopback import LoopbackFederation, loopback_federation

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600.0
NODES = 4


class Simulation(LoopbackFederation):
    """A SuperLink that simulates its nodes."""

    def start(self, name: str, command: list[str]) -> None:
        """Start a process in a group of its own, its output in ``NAME.log``."""
        told = ["--simulation"] if name == "superlink" else ["--federation-config", f"num-supernodes={NODES}"]
        super().start(name, [*command, *told])


def main() -> int:
    """Run, and print what the app said if it failed, or did not come to a page."""
    small = "baseline=false victims=1 attack.iterations=10"
    overrides = f"experiment=smoke federation.clients={NODES} {small} out={ROOT / 'runs' / 'flwr'}"
    with (
        tempfile.TemporaryDirectory(prefix="fl-privacy-flwr-") as folder,
        loopback_federation(Simulation(Path(folder).resolve(), environment={"RAY_worker_niceness": "0"})) as federation,
    ):
        federation.start_superlink()
        federation.run("run", ROOT, {"overrides": overrides})
        status, said = federation.wait("run", SECONDS), federation.said("run")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    found = [line for line in lines if line.endswith("report.html")]
    print("\n".join(found[-1:] if found and status == 0 else lines[-30:]))
    return status or int(not found)


if __name__ == "__main__":
    sys.exit(main())
