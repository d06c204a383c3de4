"""Plots of measurements, drawn only from the files under ``bench/results/``.

python -m bench.plot convergence bench/results/cpu/convergence.csv    # convergence.png, beside the file
python -m bench.plot roofline bench/results/cpu/microbench.csv        # roofline.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.lib.record import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="picture", required=True)
    convergence = commands.add_parser("convergence", help="accuracy against bytes sent, with the Pareto front")
    convergence.add_argument("csv", nargs="?", type=Path, default=RESULTS / "cpu" / "convergence.csv")
    roofline = commands.add_parser("roofline", help="encode and decode against the copy, by size")
    roofline.add_argument("csv", nargs="?", type=Path, default=RESULTS / "cpu" / "microbench.csv")
    options = parser.parse_args()
    if options.picture == "convergence":  # importing matplotlib is slow
        from bench.lib.pareto import draw_convergence

        print("written:", draw_convergence(options.csv).name)
    else:
        from bench.lib.roofline import roofline as draw_roofline

        picture = options.csv.with_name("roofline.png")
        draw_roofline(options.csv, picture)
        print("written:", picture.name)


if __name__ == "__main__":
    main()
