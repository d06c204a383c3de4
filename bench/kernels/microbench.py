"""Throughput of encode and decode, relative to the bandwidth of a copy measured at the same time.

    python -m bench.kernels.microbench                                        # the host path
    python -m bench.kernels.microbench --device cuda                          # the kernels, as in make bench-gpu
    python -m bench.kernels.microbench --compressors EFSignSGD --sizes 4Mi    # replaces just these rows of the results

Writes ``bench/results/<device type>/microbench.csv``: a row per case of ``lib/cases.py``; on the host two rows, with
one thread and with torch's default number of threads. The columns:

- ``gb_per_s``: the least bytes that must move (``moved_nbytes``) over the median time;
- ``copy_gb_per_s``: bytes read and written per second by a copy. The host copies 64 MiB between the rounds of the case.
  A GPU copies as many bytes as the case moves, timed once and in the same way;
- ``percent_of_copy``: ``gb_per_s`` relative to ``copy_gb_per_s``. Rows of the compressor ``copy`` are copies of the
  row's own size: on the host a small one stays in the caches and exceeds 100 percent;
- ``host_us_per_call``: microseconds for which a call keeps the calling thread busy, up to 16 Ki elements: the whole
  call on the host, enqueuing it on a GPU;
- ``factor_over_eager``: the time of the compressor's reference in plain torch (rows ``eager torch``) over the time of
  this row; on the host at 4 Mi elements only. ``factor_over_compiled``: the same for ``torch.compile`` of the
  reference;
- ``timing``, ``in_l2``, ``sets``, driver and clocks: on a GPU only, see ``gpu_kernels.py``;
- ``note``: why a row has no numbers.

Small sizes are measured with warm caches on the host. On a GPU calls cycle through sets of tensors, so that no call
finds its tensors in the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import gckernels
from bench.kernels import host_kernels
from bench.kernels.gpu_kernels import Bench, bandwidth_cases, directions
from bench.lib.budget import Budget
from bench.lib.cases import HOST_NUMEL, all_cases, all_specs
from bench.lib.program import program_parser
from bench.lib.sizes import parse_numel
from bench.lib.timings import Recorder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = program_parser(__doc__)
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
        cases = bandwidth_cases()
        if options.sizes:
            cases = [case for numel in options.sizes for spec in specs for case in directions(spec, numel, "float32")]
        Bench(recorder).run([case for case in cases if case.spec in ("copy", *specs)], Budget.of_this_process())
    else:
        code = host_kernels.run(all_cases(specs, options.sizes or HOST_NUMEL), recorder)
    print("written:", recorder.path.name)
    return code


if __name__ == "__main__":
    sys.exit(main())
