"""One rank under observation: `torchrun … -m nbdebug.rank script.py …`; `python -m nbdebug ranks` starts it as well."""

from __future__ import annotations

import pathlib
import sys


def main() -> None:
    from nbdebug.tools.distributed import launch

    if len(sys.argv) > 2 and sys.argv[1] == "--compare":
        sys.exit(launch.compare(pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    if len(sys.argv) < 2:
        sys.exit("usage: torchrun ... -m nbdebug.rank script.py [arguments]")
    launch.run_rank(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
