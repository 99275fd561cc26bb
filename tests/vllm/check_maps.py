"""`tracer map check` of several checkpoints in one process. Arguments: pairs of MAP and CONFIG."""

import sys

from tracer.cli.main import main

for name, config in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    try:
        main(["map", "check", name, "--host", "vllm", "--config", config])
    except SystemExit as end:
        print("exit", end.code)
