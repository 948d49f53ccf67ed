"""Entry point of ``python -m fl_privacy``."""

from fl_privacy.cli.main import main

main()
