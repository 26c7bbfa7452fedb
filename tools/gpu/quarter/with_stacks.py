"""Run a program that prints the Python stacks of all threads on SIGUSR1.

python tools/gpu/quarter/with_stacks.py PROGRAM ARGUMENTS...
python tools/gpu/quarter/with_stacks.py -m MODULE ARGUMENTS...
"""

import faulthandler
import os
import runpy
import signal
import sys

faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
