"""A server among rude clients, in turns with quiet: `python tests/serve/soak.py --seconds 300`.

It starts `paged-kv serve --demo` with a key, on this machine alone. 64 rude clients, 60 slow ones and 30 with large
bodies run in a process of their own; four others ask for 16 tokens each, over and over, and their time is taken.
Exit status 1 where a rude one got a token or an answer in a wrong shape, one of the others got none, or the median of
the others is more than twice that of the quiet turns.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.guarded_server import guarded
from support.soaking import soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of rude clients")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, guarded(Path(folder)) as server:
        soaked = soak(server, seconds)
    for name, times in (("quiet", soaked.quiet), ("rude", soaked.rude)):
        hundredths = statistics.quantiles(times, n=100)
        figures = ", ".join(f"p{p} {1e3 * hundredths[p - 1]:.0f} ms" for p in (50, 95, 99))
        print(f"{name}: {len(times)} answers, {figures}")
    print("rude clients:", ", ".join(f"{what} {count}" for what, count in sorted(soaked.seen.statuses.items())))
    print("server's process, MB:", *(f"{megabytes:.0f}" for megabytes in soaked.megabytes))
    faults = soaked.faults()
    print(*(faults[:20] or ["nothing wrong"]), sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
