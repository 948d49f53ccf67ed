"""What importing the lower layers does not bring along."""

import subprocess
import sys

HEAVY = {"flwr", "flwr_datasets", "ray", "hydra", "omegaconf", "datasets", "matplotlib", "rich", "mlxtend", "pandas"}


def test_models_and_data_import_without_the_product():
    command = "import sys, fl_privacy.data, fl_privacy.models; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not HEAVY & set(loaded)
