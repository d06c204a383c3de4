"""Train a small language model over a slow link: plain DDP, PyTorch's fp16 hook, `sync.attach`, and averaged updates.

    python -m examples.compare

Two ranks on this machine train the same model for the same steps, on a link of 200 Mbit/s between network namespaces.
The link needs no root where the system allows user namespaces. Otherwise the ranks communicate over loopback, which is
faster than any network: then little can be gained.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples import common
from gckernels.sync import lab

ARMS = {
    "none": "plain DDP",
    common.FP16_HOOK: "PyTorch's fp16 hook",
    "auto": "sync.attach(model)",
    common.UPDATES: "sync.Updates",
}
HEADER = ("", "step", "speed-up", "bytes/step", "bits per byte", "all steps")
BAR = 50


def train(arm: str, args: argparse.Namespace, links: lab.Links | None) -> dict:
    """Train one arm, and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        script = ["-m", "examples.bytes_lm", "--compressor", arm, "--steps", str(args.steps)]
        script += ["--seed", str(args.seed), "--json", str(record)]
        if links is None:
            # --standalone picks a free port, so several of these commands can run side by side
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(args.ranks), *script]
            # One thread per rank unless the caller sets it: ranks that compete for cores are slower.
            codes = [subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode]
        else:
            codes = links.run(*script)
        if any(codes):
            raise SystemExit(f"{ARMS[arm]} has failed, see above")
        return json.loads(record.read_text())


def table_row(record: dict, plain: dict) -> tuple[str, ...]:
    return (
        ARMS[record["compressor"]],
        f"{1e3 * record['late_step_s']:.1f} ms",
        f"{plain['late_step_s'] / record['late_step_s']:.1f}",
        f"{record['sent_nbytes_per_step']:,.0f}",
        f"{record['bits_per_byte']:.3f}",
        f"{record['total_s']:.1f} s",
    )


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join((row[0].ljust(widths[0]), *cells)).rstrip())


def print_bars(records: list[dict]) -> None:
    """Draw the seconds of all steps."""
    longest_s = max(record["total_s"] for record in records)
    for record in records:
        filled = round(BAR * record["total_s"] / longest_s)
        print(f"{ARMS[record['compressor']]:>21} {'█' * filled} {record['total_s']:.1f} s")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=lab.checked_rate, default="200mbit", help="of the links; none is loopback")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records here")
    args = parser.parse_args()

    start_s, records = time.monotonic(), []
    if args.rate == lab.UNTHROTTLED:
        why, where = None, "loopback"
    else:
        # returns in a process that may make links, or says why there is none
        why = lab.enter_own_namespaces(["-m", "examples.compare", *sys.argv[1:]]) or lab.missing()
        where = f"links of {args.rate}" if why is None else "loopback"
    try:
        if where == "loopback":
            if why is not None:
                print(f"No links here: {why}. The ranks use loopback, where there is little to gain.", flush=True)
            records = run_all(args, None)
        else:
            with lab.links(lab.Network(args.ranks, args.rate)) as links:
                records = run_all(args, links)
    except lab.LinksError as error:
        raise SystemExit(f"The links do not work: {error}") from None

    plain, chosen = records[0], records[list(ARMS).index("auto")]
    print(
        f"\nByte-level transformer with {plain['elements']:,} parameters, {args.ranks} ranks on {plain['device']}, "
        f"{where}, {args.steps} steps.\nThe step is the median of the second half. "
        f"torch {plain['versions']['torch']}, {plain['date']}, {time.monotonic() - start_s:.0f} s in all.\n"
    )
    print_table([HEADER, *(table_row(record, plain) for record in records)])
    print()
    print_bars(records)
    print(f"\nsync.attach(model): {chosen['decision'] or 'no plan was chosen in so few steps'}")
    print(f"{chosen['trial_steps']} of its {args.steps} steps were trials, which count in all steps.")
    print("sync.Updates: every rank steps its own optimizer; every second step sends a bit per element.")
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=2) + "\n")
    return 0


def run_all(args: argparse.Namespace, links: lab.Links | None) -> list[dict]:
    """Train all arms, one after the other."""
    records = []
    for number, arm in enumerate(ARMS, start=1):
        print(f"--- {number} of {len(ARMS)}: {ARMS[arm]}", flush=True)
        records.append(train(arm, args, links))
    return records


if __name__ == "__main__":
    sys.exit(main())
