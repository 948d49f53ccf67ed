"""What workers need, imported once by the process that they are forked from; it ends with the command that started it.

A signal to the whole process group must not end it before the command has heard of it.
"""

import gc
import signal

from fl_privacy.cli.faults import ENDING

for number in ENDING:
    signal.signal(number, signal.SIG_IGN)
gc.freeze()  # workers share the memory of what was imported, as long as none of them goes through it
