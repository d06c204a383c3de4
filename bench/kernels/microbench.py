"""Throughput of encode and decode, against the copy bandwidth of the same minute.

    python -m bench.kernels.microbench                                        # the host path, timed by pytest-benchmark
    python -m bench.kernels.microbench --device cuda                          # the kernels, as in make bench-gpu
    python -m bench.kernels.microbench --compressors EFSignSGD --sizes 4Mi    # replaces just these rows of the results

Writes ``bench/results/<device type>/microbench.csv``: a row per case of ``cases.py``, on the host two, with one thread
and with as many as torch takes by default. The columns:

- ``gb_per_s``: the fewest bytes that must move (``moved_nbytes``) over the median time;
- ``copy_gb_per_s``: reads and writes of a copy: on the host of 64 MiB, measured between the rounds of the case; on a
  GPU of as many bytes as the case moves, measured once and in the same way. ``percent_of_copy`` relates the two. Rows
  of the compressor ``copy`` are copies of the row's own size: on the host a small one stays in the caches and exceeds
  100 percent;
- ``host_us_per_call``: at 16 Ki elements and below, what a call costs the calling thread, in microseconds: on the host
  the whole call, on a GPU putting it into the stream;
- ``factor_over_eager``: the time of the compressor's reference in plain torch (rows ``eager torch``) over the time of
  this row; on the host at 4 Mi elements only. ``factor_over_compiled``: the same reference under ``torch.compile``;
- ``timing``, ``in_l2``, ``sets``, and the driver and clocks: on a GPU only, see ``gpu_kernels.py``;
- ``note``: why there is no number, where there is none.

Small sizes are measured with warm caches on the host; on a GPU calls take turns on tensors, so that those of one are
not in the cache any more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import gckernels
from bench.lib.cases import HOST_NUMEL, all_cases, all_specs
from bench.lib.sizes import parse_numel
from bench.lib.timings import Recorder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help='such as "EFSignSGD(block=1024)"')
    parser.add_argument("--sizes", nargs="+", type=parse_numel, metavar="NUMEL", help="elements, such as 16Ki or 4Mi")
    options = parser.parse_args(arguments)
    for spec in options.compressors or ():
        gckernels.from_spec(spec)  # raises now, not after minutes
    device = torch.device(options.device)
    specs = options.compressors or all_specs()
    recorder = Recorder(device, keep=options.compressors is not None or options.sizes is not None)
    torch.manual_seed(0)
    code = 0
    if device.type == "cuda":
        from bench.kernels.gpu_kernels import Bench, bandwidth_cases, directions
        from bench.lib.budget import Budget

        cases = bandwidth_cases()
        if options.sizes:
            cases = [case for numel in options.sizes for spec in specs for case in directions(spec, numel, "float32")]
        Bench(recorder).run([case for case in cases if case.spec in ("copy", *specs)], Budget.of_this_process())
    else:
        # needs pytest-benchmark, which a machine with a GPU may lack
        from bench.kernels.host_kernels import run_on_host

        code = run_on_host(all_cases(specs, options.sizes or HOST_NUMEL), recorder)
    print("written:", recorder.path.name)
    return code


if __name__ == "__main__":
    sys.exit(main())
