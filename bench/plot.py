"""Plots of measurements, drawn only from the files under ``bench/results/``.

python -m bench.plot convergence bench/results/cpu/convergence.csv    # convergence.png, beside the file
python -m bench.plot updates                                          # updates.png, from updates.csv
python -m bench.plot speedup --model transformer_10m                  # steps_transformer_10m.png, from steps.csv
"""

from __future__ import annotations

from pathlib import Path

from bench.lib.program import program_parser
from bench.lib.record import RESULTS


def main() -> None:
    parser = program_parser(__doc__)
    commands = parser.add_subparsers(dest="picture", required=True)
    convergence = commands.add_parser("convergence", help="accuracy against bytes sent, with the Pareto front")
    convergence.add_argument("csv", nargs="?", type=Path, default=RESULTS / "cpu" / "convergence.csv")
    updates = commands.add_parser("updates", help="loss against bits sent per element, with the Pareto front")
    updates.add_argument("csv", nargs="?", type=Path, default=RESULTS / "cpu" / "updates.csv")
    speedup = commands.add_parser("speedup", help="training steps against plain DDP's, by the rate of the links")
    speedup.add_argument("csv", nargs="?", type=Path, default=RESULTS / "cpu" / "steps.csv")
    speedup.add_argument("--model", default="transformer_10m")
    options = parser.parse_args()
    if options.picture in ("convergence", "updates"):  # importing matplotlib is slow
        from bench.lib.pareto import draw_convergence, draw_updates

        draw = draw_convergence if options.picture == "convergence" else draw_updates
        print("written:", draw(options.csv).name)
    else:
        from bench.lib.speedup import draw_speedup

        print("written:", draw_speedup(options.csv, options.model).name)


if __name__ == "__main__":
    main()
