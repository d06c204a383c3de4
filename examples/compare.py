"""Train every example with plain DDP and with compression, and print one table.

    python -m examples.compare

All ranks run on this machine and communicate over loopback, which is faster than any network.
Step times therefore show the cost of encoding and decoding; bytes show the gain on a slow link.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = [
    ("digits", "none"),
    ("digits", "EFSignSGD"),
    ("bytes_lm", "none"),
    ("bytes_lm", "BlockQuant(bits=4)"),
]
HEADER = ("example", "method", "bytes sent/step", "mean step", "median step", "final accuracy")


def train(example: str, method: str, ranks: int, seed: int) -> dict:
    """Run one example under torchrun and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, "-m", "torch.distributed.run"]
        # --standalone picks a free port, so several of these commands can run side by side
        command += ["--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", f"examples.{example}", "--compressor", method]
        command += ["--seed", str(seed), "--json", str(record)]
        # One thread per rank unless the caller sets it: ranks that compete for cores are slower.
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1"} | os.environ)
        return json.loads(record.read_text())


def table_row(record: dict) -> tuple[str, ...]:
    accuracy = f"{100 * record['accuracy']:.2f} %"
    if "bits_per_byte" in record:
        accuracy += f" ({record['bits_per_byte']:.3f} bits per byte)"
    return (
        record["example"],
        "plain DDP" if record["compressor"] == "none" else record["compressor"],
        f"{record['sent_nbytes_per_step']:,.0f}",
        f"{1e3 * record['mean_step_s']:.1f} ms",
        f"{1e3 * record['median_step_s']:.1f} ms",
        accuracy,
    )


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if 2 <= column <= 4 else cell.ljust(width)  # numbers to the right
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records here")
    args = parser.parse_args()

    records = []
    for example, method in RUNS:
        print(f"--- {example}, {method}", flush=True)
        try:
            records.append(train(example, method, args.ranks, args.seed))
        except subprocess.CalledProcessError as error:
            print(f"{example} with {method} failed, see above", file=sys.stderr)
            return error.returncode

    first = records[0]
    print(
        f"\n{first['world_size']} ranks on {first['device']}, torch {first['versions']['torch']}; "
        "bytes are sent by one rank; times exclude the first steps\n"
    )
    print_table([HEADER, *map(table_row, records)])
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
