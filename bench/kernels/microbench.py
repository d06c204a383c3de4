"""Throughput of the compressors, relative to the bandwidth of a copy measured beside them, in a table of results.

    pytest bench/kernels --benchmark-only --benchmark-json build/kernels.json
    python -m bench.kernels.microbench build/kernels.json           # make bench-kernels
    python -m bench.kernels.microbench build/kernels.json --keep    # replaces just these rows of the results

Writes ``bench/results/cpu/microbench.csv``: a row per call and number of threads of ``bench_codecs.py``. ``make
bench-gpu`` writes the file of a GPU, with the cases of ``gpu_kernels.py``. The columns:

- ``gb_per_s``: the least bytes that must move (``moved_nbytes``) over the median time;
- ``copy_gb_per_s``: bytes read and written per second by a copy of as many bytes, timed in the same way; until
  2026-11-25 on the host by a copy of 64 MiB;
- ``percent_of_copy``: ``gb_per_s`` relative to ``copy_gb_per_s``;
- ``host_us_per_call``: microseconds for which a call keeps the calling thread busy, up to 16 Ki elements: the whole
  call on the host, enqueuing it on a GPU;
- ``factor_over_eager``: the time of the compressor's reference in plain torch (rows ``eager torch``) over the time of
  this row; on the host up to 4 Mi elements. ``factor_over_compiled``: the same for ``torch.compile`` of the reference;
- ``timing``, ``in_l2``, ``sets``, driver and clocks: on a GPU only, see ``gpu_kernels.py``;
- ``note``: why a row has no numbers.

Small sizes are measured with warm caches on the host. On a GPU calls cycle through sets of tensors, so that no call
finds its tensors in the cache.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bench.lib.cases import Case
from bench.lib.program import program_parser
from bench.lib.timings import Recorder, Timing


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("json", type=Path, help="what pytest-benchmark has written")
    parser.add_argument("--keep", action="store_true", help="keep the rows that were not measured again")
    options = parser.parse_args()
    recorder = Recorder(torch.device("cpu"), options.keep)
    copies: dict[str, tuple[float, int]] = {}
    for benchmark in json.loads(options.json.read_text())["benchmarks"]:
        params, stats, info = benchmark["params"], benchmark["stats"], benchmark["extra_info"]
        case, nbytes, _ = Case(**info.pop("case")), info.pop("moved_nbytes"), info.pop("command")
        if case.direction == "copy":  # the first of its group
            copies[benchmark["group"]] = stats["median"], nbytes
        elif params["device_type"] == "cpu":
            times_s = stats["q1"], stats["median"], stats["q3"]
            timing = Timing(*times_s, *copies[benchmark["group"]], host_s=stats["median"], columns=info)
            recorder.add(case, params["threads"], timing)
    print("written:", recorder.path.name)


if __name__ == "__main__":
    main()
