"""`tracer map check` of several checkpoints in one process, each with the map of its class. Arguments: CONFIG..."""

import sys

from tracer.cli.main import main

for config in sys.argv[1:]:
    try:
        main(["map", "check", "auto", "--host", "vllm", "--config", config])
    except SystemExit as end:
        print("exit", end.code)
