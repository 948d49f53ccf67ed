"""Imports shared by forked workers; ignores signals to the process group, which the command must handle first."""

import gc
import signal

from fl_privacy.cli.faults import ENDING

for number in ENDING:
    signal.signal(number, signal.SIG_IGN)
gc.freeze()  # workers share the memory of imported modules unless a collection touches it
